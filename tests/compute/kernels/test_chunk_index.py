"""The indexer of many queries against the torch path."""

from __future__ import annotations

import pytest
import torch

from compute import formats
from compute.kernels import chunk_index
from compute.layers import indexer
from tests.compute.kernels.comparing import DEVICE, assert_same_bf16

SIZES = [(3, 20, 4), (9, 150, 16), pytest.param(300, 3000, 32, marks=pytest.mark.gpu)]
BLOCK = 8


def drawn(tokens: int, keys: int, heads: int) -> list[torch.Tensor]:
    """Queries and keys on the fp4 grid, heads' weights, and how many rows each query sees."""
    queries = formats.round_trip_fp4_index(torch.randn(tokens, heads, 128).bfloat16())
    rows = formats.round_trip_fp4_index(torch.randn(keys, 128).bfloat16())
    weights = (torch.randn(tokens, heads) * 0.02).bfloat16()
    visible = torch.randint(0, keys + 1, (tokens,))
    visible[0] = 0
    return [queries, rows, weights, visible]


@pytest.mark.parametrize(("tokens", "keys", "heads"), SIZES)
@pytest.mark.parametrize("restricted", [False, True])
def test_scores_are_torchs_where_a_query_sees_and_least_elsewhere(
    tokens: int, keys: int, heads: int, restricted: bool
) -> None:
    given = drawn(tokens, keys, heads)
    blocks = torch.rand(tokens, -(-keys // BLOCK)) < 0.5 if restricted else None
    want = indexer.masked_scores(*given, blocks, BLOCK)
    there = None if blocks is None else blocks.to(DEVICE)
    got = chunk_index.masked_scores(*(part.to(DEVICE) for part in given), there, BLOCK).cpu()
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    seen = want != -torch.inf
    # Sums of rounded parts, in another order.
    assert_same_bf16(got[seen], want[seen], 2e-2)


@pytest.mark.parametrize(("tokens", "keys", "heads"), SIZES)
def test_choices_are_torchs(tokens: int, keys: int, heads: int) -> None:
    *given, visible = drawn(tokens, keys, heads)
    scores = indexer.masked_scores(*given, visible, None, BLOCK)
    for k in (1, keys // 3, keys):
        want = indexer.choose_rows(scores, k)
        got = chunk_index.choose_rows(scores.to(DEVICE), k).cpu()
        assert torch.equal(got, want)  # unseen rows come last: what is chosen leads in both
    blocks = indexer.candidate_blocks(scores, visible, BLOCK, 2)
    got = chunk_index.candidate_blocks(scores.to(DEVICE), visible.to(DEVICE), BLOCK, 2).cpu()
    assert torch.equal(got, blocks)
