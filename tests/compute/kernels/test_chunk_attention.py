"""Attention of many queries against the torch path, which defines its roundings."""

from __future__ import annotations

import pytest
import torch

from compute.kernels import chunk_attention
from compute.layers import attention
from compute.rope import Rotation, rotate_tail, rotation
from tests.compute.kernels.comparing import DEVICE, assert_close


def problem(tokens: int, heads: int, width: int, near: int, far: int) -> tuple[torch.Tensor, ...]:
    """Queries, sink, window, its slots, rows and theirs; early queries see little."""
    queries = torch.randn(tokens, heads, width).bfloat16()
    window = torch.randn(tokens + near, width).bfloat16()
    rows = torch.randn(max(tokens, far), width).bfloat16()
    slots = attention.window_slots(torch.arange(tokens), near, 0)
    chosen = torch.randint(0, len(rows), (tokens, far)).sort(-1).values
    chosen[torch.arange(far) >= torch.arange(tokens).unsqueeze(1)] = -1
    return queries, torch.randn(heads), window, slots, rows, chosen


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert_close(got, want, 3e-3)
    assert (got != want).float().mean() < 0.02


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "near", "far"),
    [(3, 4, 32, 8, 0), (5, 4, 48, 16, 70), (70, 5, 32, 64, 96)],
)
def test_a_chunk_attends_as_torch_does(
    tokens: int, heads: int, width: int, near: int, far: int
) -> None:
    given = problem(tokens, heads, width, near, far)
    got = chunk_attention.sparse_attention(*(part.to(DEVICE) for part in given))
    close(got.cpu(), attention.sparse_attention(*given))


def test_a_query_without_a_slot_gives_zeros() -> None:
    queries, sink, window, slots, rows, chosen = (
        part.to(DEVICE) for part in problem(4, 4, 32, 8, 16)
    )
    slots[2] = -1
    chosen[2] = -1
    out = chunk_attention.sparse_attention(queries, sink, window, slots, rows, chosen.int())
    assert not out[2].any()
    assert out[1].any()


@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_in_place_is_the_models(inverse: bool) -> None:
    x = torch.randn(3, 5, 48).bfloat16()
    turn = rotation(torch.tensor([0, 7, 1000]), torch.rand(8))
    want = rotate_tail(x, turn, inverse=inverse)
    by = Rotation(*(part.to(DEVICE) for part in turn))
    got = chunk_attention.rotate_tail(x.to(DEVICE), by, inverse=inverse).cpu()
    assert (got.float() - want.float()).abs().max() <= 2**-7 * want.float().abs().max()
    assert (got != want).float().mean() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize(("near", "far"), [(128, 0), (128, 512)])
def test_a_chunk_attends_as_torch_does_at_released_widths(near: int, far: int) -> None:
    given = problem(700, 64, 512, near, far)[: 6 if far else 4]
    got = chunk_attention.sparse_attention(*(part.to(DEVICE) for part in given))
    close(got.cpu(), attention.sparse_attention(*given))
