"""A token as captured graphs on a GPU: the bits of eager launches, whatever moves or repeats."""

from __future__ import annotations

import random

import pytest
import torch

from compute.decode.assembly import GRAPHS, decoder_over
from compute.decode.graphs import Graphs
from compute.decode.oracle import TokenOracle
from compute.device_experts import DeviceExperts
from compute.sequence import SequenceState
from tests.golden.cases import CASE_NAMES, DEVICE, case
from tests.golden.decoding import decode, mini_decoder, mini_step, request, tokens_of
from tests.golden.harness import Mini, config, relative
from tests.golden.held import HeldExperts
from tests.golden.test_decode import DRIFT
from tests.golden.test_end_to_end import assert_same_choice

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
    rows = decode(decoder, mini.engram, tokens, state, len(tokens) - length)
    return rows, runner.captures


@pytest.mark.parametrize("name", ["mini_len001", "mini_len016", "mini_len100"])
def test_a_replay_differs_from_eager_launches(name: str) -> None:
    eager, _ = decoded(name, graphs=False, capacity=200)
    replayed, captures = decoded(name, graphs=True, capacity=200)
    assert torch.equal(replayed, eager)
    assert captures == 2 * config().num_hidden_layers


def test_rows_that_moved_are_read_where_they_lay() -> None:
    eager, _ = decoded("mini_len037", graphs=False, capacity=200)
    # Room for 64 rows runs out on the way.
    replayed, captures = decoded("mini_len037", graphs=True, capacity=64)
    assert torch.equal(replayed, eager)
    assert captures > 2 * config().num_hidden_layers


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
        first = decode(decoder, mini.engram, tokens, state, 4)
        if shared:
            decoder = mini_decoder(mini.engram, step=step, runner=runner)
        answers.append(torch.cat([first, decode(decoder, mini.engram, tokens, state, 4)]))
    assert torch.equal(*answers)


@pytest.mark.parametrize("mode", GRAPHS)
@pytest.mark.parametrize("name", CASE_NAMES)
def test_a_golden_case_drifts_in_one_graph_mode(name: str, mode: str) -> None:
    """As through the torch path, with experts that come and go on the device."""
    tokens, length = tokens_of(name)
    mini, step = Mini(), mini_step()
    tier = DeviceExperts(HeldExperts(), config(), DEVICE, 40)
    decoder = decoder_over(step, tier, mini.engram, graphs=mode)
    state = SequenceState(config(), DEVICE, 200)
    mini.run(tokens, state, 0, length, every=False)
    got = decode(decoder, mini.engram, tokens, state, len(tokens) - length)
    want = case(name)["decode.logits"]
    assert relative(got, want) <= DRIFT
    assert_same_choice(got, want)
    if isinstance(decoder, TokenOracle):
        assert decoder.compared == len(got) and decoder.differences == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_the_oracle_finds_a_differing_bit_in_200_steps(in_place: bool) -> None:
    """Across the window's wrap, groups, candidates, and experts that come and go on the device."""
    mini = Mini(reference_index_keys=False)
    step = mini_step(reference_index_keys=False)
    tier = DeviceExperts(HeldExperts(), config(), DEVICE, 40, in_place=in_place)
    oracle = decoder_over(step, tier, mini.engram, graphs="oracle")
    assert isinstance(oracle, TokenOracle)
    state = SequenceState(config(), DEVICE, 256)
    chance = random.Random(7)
    tokens = [chance.randrange(3, 500) for _ in range(200)]
    assert decode(oracle, mini.engram, tokens, state, 200).isfinite().all()
    assert oracle.compared == 200
    assert oracle.differences == 0


@pytest.mark.parametrize("mode", ["on", "token"])
def test_nothing_is_allocated_after_the_first_tokens(mode: str) -> None:
    mini = Mini(reference_index_keys=False)
    step = mini_step(reference_index_keys=False)
    tier = DeviceExperts(HeldExperts(), config(), DEVICE, 40)
    decoder = decoder_over(step, tier, mini.engram, graphs=mode)
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
