"""A token as captured graphs on a GPU: the bits of eager launches, whatever moves or repeats."""

from __future__ import annotations

import pytest
import torch

from compute.decode.graphs import Graphs
from compute.sequence import SequenceState
from tests.golden.cases import DEVICE
from tests.golden.decoding import mini_decoder
from tests.golden.harness import Mini, config
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
