"""A token that runs by itself while the host answers it: symptoms are another bit than eager
launches give, an answer of an earlier layer taken for this one's, a token half done that shows in
the next, and a wait without an end. On a CPU a thread plays the device."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from compute.decode.graphs import Eager, Graphs, OneGraph, TokenRunner
from compute.decode.oracle import Oracle, TokenOracle
from compute.decode.step import DecodeStep
from compute.decode.token import LOOKS, TokenDecoder
from compute.device_experts import DeviceExperts, HoldingSource
from compute.sequence import SequenceState
from compute.slot_views import HeldExpert
from protocol import counters
from protocol.errors import ReadError
from tests.golden.cases import DEVICE
from tests.golden.decoding import (
    PREDICTIONS,
    decode,
    mini_decoder,
    mini_step,
    request,
    tokens_of,
)
from tests.golden.harness import Mini, config
from tests.golden.held import HeldExperts
from tests.golden.test_decode import assert_same_state
from tests.ipc.compute_side import ExpertRig

PICKS = config().num_experts_per_tok
EVERY = config().num_hidden_layers * config().n_routed_experts


class Thread:
    """A TokenRunner: the device's part done by a thread beside the host's."""

    def __init__(self) -> None:
        self._thread = threading.Thread()
        self.failures: list[BaseException] = []

    def start(self, launch: Callable[[], None]) -> bool:
        def work() -> None:
            try:
                with torch.inference_mode():
                    launch()
            except BaseException as error:
                self.failures.append(error)

        self._thread = threading.Thread(target=work)
        self._thread.start()
        return True

    def running(self) -> bool:
        assert not self.failures, self.failures
        return self._thread.is_alive()


@pytest.fixture(autouse=True)
def quick_hand_over() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def device_runner(step: DecodeStep) -> TokenRunner:
    return OneGraph(Graphs(DEVICE, step.baked)) if DEVICE.type == "cuda" else Thread()


class Rig:
    """A sequence that is decoded as whole tokens over `slots` of the device."""

    def __init__(
        self,
        slots: int,
        *,
        held: HoldingSource | None = None,
        in_place: bool = False,
        looks: int = LOOKS,
        name: str = "mini_len016",
    ) -> None:
        self.tokens, self.length = tokens_of(name)
        self.mini = Mini(reference_index_keys=False)
        self.step = mini_step(reference_index_keys=False)
        self.held = held or HeldExperts()
        self.tier = DeviceExperts(self.held, config(), DEVICE, slots, in_place=in_place)
        self.eager = mini_decoder(
            self.mini.engram, step=self.step, experts=self.tier, runner=Eager()
        )
        self.token = TokenDecoder(self.eager, self.tier, device_runner(self.step), looks=looks)
        self.state = SequenceState(config(), DEVICE, 200)
        self.mini.run(self.tokens, self.state, 0, self.length, every=False)

    def logits(self, steps: int) -> torch.Tensor:
        """[steps, V] of the next tokens."""
        return decode(self.token, self.mini.engram, self.tokens, self.state, steps)


def eagerly(name: str, steps: int) -> tuple[torch.Tensor, SequenceState]:
    """Logits [steps, V] of eager launches with every expert there, and the state after them."""
    tokens, length = tokens_of(name)
    mini = Mini(reference_index_keys=False)
    decoder = mini_decoder(mini.engram, reference_index_keys=False)
    state = SequenceState(config(), DEVICE, 200)
    mini.run(tokens, state, 0, length, every=False)
    return decode(decoder, mini.engram, tokens, state, steps), state


@pytest.mark.parametrize(
    ("slots", "in_place"), [(2 * PICKS, False), (24, False), (EVERY, False), (2 * PICKS, True)]
)
def test_a_bit_depends_on_where_experts_lay(slots: int, in_place: bool) -> None:
    wanted, state = eagerly("mini_len016", 8)
    rig = Rig(slots, in_place=in_place)
    assert torch.equal(rig.logits(8), wanted)
    assert_same_state(rig.state, state)
    assert rig.token.repeated == 0
    assert rig.held.asked > 8


def test_what_is_on_the_device_is_asked_for() -> None:
    rig = Rig(EVERY)
    for layer in range(config().num_hidden_layers):
        for first in range(0, config().n_routed_experts, PICKS):
            last = min(first + PICKS, config().n_routed_experts)
            rig.tier.place(layer, range(first, last))
    before, hits = rig.held.asked, rig.tier.counts[counters.DEVICE_HITS]
    rig.logits(3)
    assert rig.held.asked == before
    # Recency is heard of all the same.
    picked = 3 * config().num_hidden_layers * PICKS
    assert rig.tier.counts[counters.DEVICE_HITS] - hits == picked


def test_a_wait_that_runs_out_shows_in_the_text() -> None:
    """The device never looks, so every token with a miss is run again from a half-done state."""
    wanted, state = eagerly("mini_len016", 6)
    rig = Rig(2 * PICKS, looks=0)
    assert torch.equal(rig.logits(6), wanted)
    assert_same_state(rig.state, state)
    assert rig.token.repeated == 6


class Failing(HeldExperts):
    """The nth time that experts are asked for they cannot be read."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self._nth = nth

    def hold(
        self, layer: int, experts: Sequence[int], asking: Callable[[], None] | None = None
    ) -> list[HeldExpert]:
        if self.asked + 1 == self._nth:
            self.asked += 1
            raise ReadError(f"layer {layer}: shard 7: Input/output error")
        return super().hold(layer, experts, asking)


def test_a_failed_read_leaves_the_device_waiting_or_the_next_token_wrong() -> None:
    layers = config().num_hidden_layers
    rig = Rig(2 * PICKS, held=Failing(layers + 4))
    wanted, _ = eagerly("mini_len016", 6)
    rig.logits(1)
    snapshot = rig.state.snapshot()
    with pytest.raises(ReadError, match="shard 7"):
        rig.logits(1)
    rig.mini.engram.open.clear()
    rig.state.restore(snapshot)
    assert torch.equal(rig.logits(5), wanted[1:])


@pytest.mark.parametrize("here", [False, True])
def test_a_token_waits_for_its_rows_before_it_begins_or_they_for_its_first_layer(
    here: bool,
) -> None:
    wanted, _ = eagerly("mini_len016", 4)
    rig = Rig(2 * PICKS)
    rows, engram = rig.mini.engram.rows, rig.mini.engram
    served: list[bool] = []

    def late(ticket: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Its experts have been asked for, so the first layer has been heard.
        served.append(rig.held.asked > asked)
        return rows(ticket, index)

    engram.rows = late  # type: ignore[method-assign]
    engram.here = lambda ticket: here  # type: ignore[method-assign]
    for step in range(4):
        asked = rig.held.asked
        assert torch.equal(rig.logits(1), wanted[step : step + 1])
    assert rig.token.repeated == 0
    assert served == [not here] * 4 * len(config().engram_layer_ids)


def test_rows_that_cannot_be_read_leave_the_device_waiting_or_the_next_token_wrong() -> None:
    wanted, _ = eagerly("mini_len016", 5)
    rig = Rig(2 * PICKS)
    rows, engram = rig.mini.engram.rows, rig.mini.engram

    def failing(ticket: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise ReadError("shard 9: Input/output error")

    rig.logits(1)
    snapshot = rig.state.snapshot()
    engram.rows = failing  # type: ignore[method-assign]
    engram.here = lambda ticket: False  # type: ignore[method-assign]
    with pytest.raises(ReadError, match="shard 9"):
        rig.logits(1)
    engram.rows = rows  # type: ignore[method-assign]
    engram.open.clear()
    rig.state.restore(snapshot)
    assert torch.equal(rig.logits(4), wanted[1:])
    assert rig.token.repeated == 0


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the arena here is not registered with a GPU")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_slot_of_the_arena_is_rewritten_under_a_running_token(in_place: bool) -> None:
    """A service in its own process evicts all the time; every slot is verified when let go."""
    wanted, _ = eagerly("mini_len016", 5)
    with ExpertRig(4 * PICKS, restless=0.3) as arena:
        rig = Rig(2 * PICKS, held=arena.experts, in_place=in_place)
        assert torch.equal(rig.logits(5), wanted)
        assert rig.token.repeated == 0
        hints = arena.messages("Hint")
        assert len(hints) >= 4 * config().num_hidden_layers
        assert arena.messages("Demand")


def test_every_layer_is_hinted_with_its_picks_and_what_it_predicts() -> None:
    hints: dict[str, list[object]] = {"eager": [], "token": []}
    for way, told in hints.items():
        rig = Rig(2 * PICKS)
        rig.held.hint = lambda *said, told=told: told.append(said)
        decoder = rig.token if way == "token" else rig.eager
        for at in range(rig.length, rig.length + 3):
            ticket = request(rig.mini.engram, rig.tokens, at)
            decoder.forward(rig.tokens[at], rig.state, ticket)
    picks = [said[:3] for said in hints["eager"]]
    assert [said[:3] for said in hints["token"]] == picks
    assert len(picks) == 3 * config().num_hidden_layers
    assert PREDICTIONS > 0 and any(said[3] for said in hints["token"])


def test_the_oracle_finds_a_difference_between_the_three_ways() -> None:
    rig = Rig(24, name="mini_len100")
    inner = Oracle(rig.step, _segments(rig.step))
    segments = mini_decoder(rig.mini.engram, step=rig.step, experts=rig.tier, runner=inner)
    oracle = TokenOracle(rig.token, segments, inner)
    steps = 40 if DEVICE.type == "cuda" else 4
    for at in range(rig.length, rig.length + steps):
        ticket = request(rig.mini.engram, rig.tokens, at)
        oracle.forward(rig.tokens[at], rig.state, ticket)
    assert oracle.compared == steps and rig.state.length == rig.length + steps
    assert inner.compared == steps * 2 * config().num_hidden_layers
    assert oracle.differences == 0


def test_the_oracle_overlooks_a_wrong_bit(capsys: pytest.CaptureFixture[str]) -> None:
    rig = Rig(EVERY)
    inner = Oracle(rig.step, _segments(rig.step))
    segments = mini_decoder(rig.mini.engram, step=rig.step, experts=rig.tier, runner=inner)
    oracle = TokenOracle(rig.token, segments, inner)
    rig.logits(1)
    honest = rig.token.run

    def wrong(token: int, state: SequenceState, ticket: int) -> torch.Tensor:
        logits = honest(token, state, ticket)
        rig.step.buffers.logits.view(-1)[7] += 1
        return logits

    rig.token.run = wrong  # type: ignore[method-assign]
    ticket = request(rig.mini.engram, rig.tokens, rig.state.length)
    oracle.forward(rig.tokens[rig.state.length], rig.state, ticket)
    assert oracle.differences == 1
    assert f"position {rig.length + 1}: logits.0 differs" in capsys.readouterr().err


def _segments(step: DecodeStep) -> object:
    return Graphs(DEVICE, step.baked) if DEVICE.type == "cuda" else Eager()
