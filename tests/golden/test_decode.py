"""Decode steps through the kernels, against the torch path: the same bits on a CPU.

On a CPU the kernels' references stand in for them, so this checks the order of the launches, what
they are given and what the host does between them; the kernels have tests of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import pytest
import torch

from compute.decode.graphs import Eager
from compute.device_experts import DeviceExperts
from compute.sequence import SequenceState
from compute.sources import Addresses
from tests.golden.cases import CASE_NAMES, DEVICE
from tests.golden.decoding import PREDICTIONS, mini_decoder, request, tokens_of
from tests.golden.harness import Mini, config, relative
from tests.golden.held import HeldExperts

CPU_ONLY = pytest.mark.skipif(DEVICE.type != "cpu", reason="bits are compared on one device")
# Both ways are within this of the reference; it is what their roundings may make of each other.
DRIFT = 0.12


def both_ways(
    name: str, steps: int, *, reference_index_keys: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [steps, V] of the kernels and of the torch path, each over its own state; the states
    end the same."""
    tokens, length = tokens_of(name)
    mini = Mini(reference_index_keys=reference_index_keys)
    decoder = mini_decoder(mini.engram, reference_index_keys=reference_index_keys)
    ours, theirs = mini.model.new_state(), mini.model.new_state()
    for state in (ours, theirs):
        mini.run(tokens, state, 0, length, every=False)
    got, want = [], []
    for at in range(length, length + steps):
        ticket = request(mini.engram, tokens, at)
        got.append(decoder.forward(tokens[at], ours, ticket))
        mini.engram.done(ticket)
        want.append(mini.run(tokens, theirs, at, at + 1, every=False))
    if DEVICE.type == "cpu":
        assert_same_state(ours, theirs)
    return torch.stack(got), torch.stack(want)


def assert_same_state(got: SequenceState, want: SequenceState) -> None:
    found, expected = got.snapshot(), want.snapshot()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


# On a CPU a few steps across what changes: the first groups, the window's wrap, the candidates.
STEPS = {"mini_len001": 18, "mini_len100": 6, "mini_len017": 6}


@pytest.mark.parametrize("name", CASE_NAMES if DEVICE.type == "cuda" else STEPS)
def test_a_decode_step_departs_from_the_torch_path(name: str) -> None:
    steps = STEPS[name] if DEVICE.type == "cpu" else 40
    got, want = both_ways(name, steps, reference_index_keys=name != "mini_len017")
    if DEVICE.type == "cpu":
        assert torch.equal(got, want)
    assert relative(got, want) <= DRIFT


class NotedExperts(DeviceExperts):
    """Has every other layer's experts on the device; notes what it is asked and told."""

    def __init__(self) -> None:
        every = config().num_hidden_layers * config().n_routed_experts
        super().__init__(HeldExperts(), config(), DEVICE, every)
        self.calls: list[str] = []
        self.hints: list[tuple[int, list[int], int | None, list[int], list[float]]] = []
        for layer in range(1, config().num_hidden_layers, 2):
            self.place(layer, range(config().n_routed_experts))
        self.calls.clear()

    def place(
        self, layer: int, experts: Sequence[int], asking: Callable[[], None] | None = None
    ) -> Addresses:
        self.calls.append(f"place {layer}")
        return super().place(layer, experts, asking)

    def hint(
        self,
        layer: int,
        picks: Sequence[int],
        predicted_layer: int | None,
        predicted: Sequence[int],
        scores: Sequence[float],
    ) -> None:
        self.calls.append(f"hint {layer}")
        self.hints.append((layer, list(picks), predicted_layer, list(predicted), list(scores)))

    def release(self) -> None:
        self.calls.append("release")
        super().release()


@CPU_ONLY
def test_a_token_hints_places_and_releases_once_a_layer_and_predicts_as_the_torch_path() -> None:
    tokens, length = tokens_of("mini_len016")
    mini, source = Mini(), NotedExperts()
    decoder = mini_decoder(mini.engram, experts=source)
    state = mini.model.new_state()
    mini.run(tokens, state, 0, length, every=False)
    ticket = request(mini.engram, tokens, length)
    decoder.forward(tokens[length], state, ticket)
    layers = range(config().num_hidden_layers)
    # Whom we wait for knows the prediction before; else nothing stands before the launch.
    asked, there = ["place {n}", "hint {n}", "release"], ["release", "hint {n}"]
    expected = [c.format(n=n) for n in layers for c in (there if n % 2 else asked)]
    assert source.calls == expected
    for layer, picks, following, predicted, scores in source.hints:
        assert picks == sorted(set(picks)) and len(picks) == config().num_experts_per_tok
        last = layer + 1 == config().num_hidden_layers
        assert following == (None if last else layer + 1)
        assert len(predicted) == len(scores) == (0 if last else PREDICTIONS)
        assert scores == sorted(scores, reverse=True)
        if not last:
            assert scores[config().num_experts_per_tok - 1] == 0


@CPU_ONLY
def test_a_state_outgrows_its_room_in_the_middle_of_a_sequence() -> None:
    """Rows move when their storage grows; what was reserved does not move."""
    tokens, length = tokens_of("mini_len024_images_none")
    answers = []
    for capacity in (length + 3, 200):
        mini = Mini()
        decoder = mini_decoder(mini.engram)
        state = SequenceState(config(), DEVICE, capacity)
        mini.run(tokens, state, 0, length, every=False)
        logits, moved = [], set()
        for at in range(length, length + 6):
            ticket = request(mini.engram, tokens, at)
            logits.append(decoder.forward(tokens[at], state, ticket))
            moved.add(state.compressed[5].rows.data_ptr())
        assert (len(moved) == 1) == (capacity == 200)
        answers.append(torch.stack(logits))
    assert torch.equal(*answers)


class Unfinished:
    """A SegmentRunner beside the host, which never learns that a segment has ended."""

    def __init__(self) -> None:
        self._launches: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def run(self, segment: int, launch: Callable[[], None]) -> None:
        self._launches.put(launch)

    def end(self) -> None:
        self._launches.put(None)
        self._thread.join()

    def _work(self) -> None:
        launch = self._launches.get()
        while launch is not None:
            with torch.inference_mode():
                launch()
            launch = self._launches.get()


@CPU_ONLY
@pytest.mark.parametrize("slots", [2 * config().num_experts_per_tok, 200])
def test_the_host_waits_for_more_of_a_segment_than_its_picks(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, length = tokens_of("mini_len016")
    answers = []
    for runner in (Eager(), Unfinished()):
        mini = Mini(reference_index_keys=False)
        tier = DeviceExperts(HeldExperts(), config(), DEVICE, slots)
        decoder = mini_decoder(mini.engram, experts=tier, runner=runner, reference_index_keys=False)
        state = SequenceState(config(), DEVICE, 200)
        mini.run(tokens, state, 0, length, every=False)
        if isinstance(runner, Unfinished):
            monkeypatch.setattr(decoder, "_running", lambda: True)
        ticket = request(mini.engram, tokens, length)
        decoder.forward(tokens[length], state, ticket)
        if isinstance(runner, Unfinished):
            runner.end()
        answers.append(decoder.step.buffers.logits.clone())
        assert decoder.waits == config().num_hidden_layers
    assert torch.equal(*answers)
