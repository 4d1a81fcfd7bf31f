"""A token as captured graphs on a GPU: the bits of eager launches, whatever moves or repeats."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from compute.decode.graphs import Graphs
from compute.decode.oracle import Oracle
from compute.device_experts import DeviceExperts
from compute.resident import ResidentExperts
from compute.sequence import SequenceState
from compute.slot_views import HeldExpert
from tests.golden.cases import DEVICE
from tests.golden.decoding import mini_decoder, mini_step
from tests.golden.harness import Mini, config, shards
from tests.golden.test_decode import request, tokens_of

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs need a GPU")


def decoded(name: str, *, graphs: bool, capacity: int) -> tuple[torch.Tensor, int]:
    """Logits [40, V] of a case's decode steps, and how many captures there were."""
    tokens, length = tokens_of(name)
    mini = Mini(reference_index_keys=False)
    decoder = mini_decoder(mini.engram, reference_index_keys=False)
    runner = Graphs(DEVICE, decoder.step.baked)
    if graphs:
        decoder = mini_decoder(mini.engram, step=decoder.step, runner=runner)
    state = SequenceState(config(), DEVICE, capacity)
    mini.run(tokens, state, 0, length, every=False)
    rows = []
    for at in range(length, len(tokens)):
        ticket = request(mini.engram, tokens, at)
        rows.append(decoder.forward(tokens[at], state, ticket))
        mini.engram.done(ticket)
    return torch.stack(rows), runner.captures


@pytest.mark.parametrize("name", ["mini_len001", "mini_len016", "mini_len100"])
def test_a_replay_differs_from_eager_launches(name: str) -> None:
    eager, _ = decoded(name, graphs=False, capacity=200)
    replayed, captures = decoded(name, graphs=True, capacity=200)
    assert torch.equal(replayed, eager)
    assert captures == config().num_hidden_layers + 1


def test_rows_that_moved_are_read_where_they_lay() -> None:
    eager, _ = decoded("mini_len037", graphs=False, capacity=200)
    # Room for 64 rows runs out on the way.
    replayed, captures = decoded("mini_len037", graphs=True, capacity=64)
    assert torch.equal(replayed, eager)
    assert captures > config().num_hidden_layers + 1


def test_another_decoder_over_the_same_graphs_has_its_own_inputs() -> None:
    """Its host buffers are others than those that were baked in."""
    tokens, length = tokens_of("mini_len016")
    answers = []
    for shared in (False, True):
        mini = Mini(reference_index_keys=False)
        step = mini_step(reference_index_keys=False)
        runner = Graphs(DEVICE, step.baked)
        state = SequenceState(config(), DEVICE, 100)
        mini.run(tokens, state, 0, length, every=False)
        decoder = mini_decoder(mini.engram, step=step, runner=runner)
        rows = []
        for at in range(length, length + 8):
            if shared and at == length + 4:
                decoder = mini_decoder(mini.engram, step=step, runner=runner)
            ticket = request(mini.engram, tokens, at)
            rows.append(decoder.forward(tokens[at], state, ticket))
            mini.engram.done(ticket)
        answers.append(torch.stack(rows))
    assert torch.equal(*answers)


class PinnedExperts:
    """Every expert of the mini checkpoint in pinned memory, as an arena would hold them."""

    def __init__(self) -> None:
        held = ResidentExperts(shards(), torch.device("cpu"))
        self._memory: dict[tuple[int, int], HeldExpert] = {}
        for layer in range(config().num_hidden_layers):
            for expert, parts in held.fetch(layer, range(config().n_routed_experts)):
                in_order = (parts.w1, parts.w3, parts.w2)
                in_order += (parts.w1_scale, parts.w3_scale, parts.w2_scale)
                sizes = [part.nbytes for part in in_order]
                memory = torch.cat([part.flatten() for part in in_order]).pin_memory()
                place = [sum(sizes[:at]) for at in range(6)]
                self._memory[layer, expert] = HeldExpert(memory, place)
        self.fetch, self.hint, self.release = held.fetch, held.hint, held.release

    def hold(self, layer: int, experts: Sequence[int]) -> list[HeldExpert]:
        return [self._memory[layer, expert] for expert in experts]

    def read_until(self, event: torch.cuda.Event) -> None:
        """Nothing is ever rewritten."""


@pytest.mark.parametrize("in_place", [False, True])
def test_the_oracle_finds_a_differing_bit_in_200_steps(in_place: bool) -> None:
    """Across the window's wrap, groups, candidates, and experts that come and go on the device."""
    mini = Mini(reference_index_keys=False)
    step = mini_step(reference_index_keys=False)
    oracle = Oracle(step, Graphs(DEVICE, step.baked))
    tier = DeviceExperts(PinnedExperts(), config(), DEVICE, 40, in_place=in_place)
    decoder = mini_decoder(mini.engram, step=step, runner=oracle, experts=tier)
    state = SequenceState(config(), DEVICE, 256)
    chance = random.Random(7)
    tokens: list[int] = []
    for at in range(200):
        tokens.append(chance.randrange(3, 500))
        ticket = request(mini.engram, tokens, at)
        assert decoder.forward(tokens[at], state, ticket).isfinite().all()
        mini.engram.done(ticket)
    assert oracle.compared == 200 * (config().num_hidden_layers + 1)
    assert oracle.differences == 0


def test_nothing_is_allocated_after_the_first_tokens() -> None:
    mini = Mini(reference_index_keys=False)
    step = mini_step(reference_index_keys=False)
    tier = DeviceExperts(PinnedExperts(), config(), DEVICE, 40)
    runner = Graphs(DEVICE, step.baked)
    decoder = mini_decoder(mini.engram, step=step, runner=runner, experts=tier)
    state = SequenceState(config(), DEVICE, 600)
    chance = random.Random(8)
    tokens: list[int] = []
    reserved = []
    for at in range(600):
        tokens.append(chance.randrange(3, 500))
        ticket = request(mini.engram, tokens, at)
        decoder.forward(tokens[at], state, ticket)
        mini.engram.done(ticket)
        if at in (10, 599):
            torch.cuda.synchronize()
            reserved.append((torch.cuda.memory_reserved(), torch.cuda.memory_allocated()))
    assert reserved[0] == reserved[1]
    assert runner.captures == config().num_hidden_layers + 1
