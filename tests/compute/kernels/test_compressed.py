"""What happens to compressed KV: groups, index keys, scores, the exact choice of rows, the engram
gate.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from compute.formats import round_trip_fp4_index
from compute.kernels import compressor, engram, indexer, reference
from compute.rope import frequencies, rotation
from tests.compute.kernels.comparing import (
    DEVICE,
    assert_close,
    assert_same_bf16,
    assert_same_grid,
    poisoned,
    run_both,
)

FP32 = torch.float32
gpu = pytest.mark.gpu


def wide(*values: object) -> object:
    return pytest.param(*values, marks=gpu)


@pytest.mark.parametrize(("tokens", "width"), [(2, 96), (1, 300), wide(1, 5120)])
def test_engram_gate_matches(tokens: int, width: int) -> None:
    got, want = run_both(
        engram.engram_add, reference.engram_add,
        (torch.randn(tokens, 4, width) * 5).to(torch.bfloat16),
        torch.randn(tokens, 5 * width).to(torch.bfloat16),
        torch.randn(4, width).to(torch.bfloat16), torch.randn(4, width).to(torch.bfloat16),
        torch.rand(tokens, 4), poisoned(tokens, width), eps=1e-20,
    )  # fmt: skip
    assert_same_bf16(got[0], want[0])
    assert_same_bf16(got[5], want[5])


@pytest.mark.parametrize(
    ("ratio", "width", "rotated", "splits"),
    [(1, 64, 32, 2), (2, 96, 16, 1), (3, 64, 32, 2), wide(1, 512, 64, 8), wide(2, 512, 64, 8)],
)
def test_groups_fill_token_by_token_and_become_rows(
    ratio: int, width: int, rotated: int, splits: int
) -> None:
    kinds = 1 if ratio == 1 else 2
    state = [torch.zeros(2, ratio, width) for _ in range(2)]
    rows = [torch.zeros(4, width).to(torch.bfloat16) for _ in range(2)]
    weight = torch.rand(width)
    for at in range(3 * ratio + ratio // 2):
        turn = rotation(torch.tensor([at // ratio * ratio]), frequencies(rotated, 1.6e5, None))
        got, want = run_both(
            compressor.compress_step, reference.compress_step,
            torch.randn(splits, 1, kinds * width) * 2, weight, turn.cos, turn.sin,
            torch.tensor([at]), state[0], poisoned(1, width), rows[0],
            reference_arguments={5: state[1], 7: rows[1]}, ratio=ratio, eps=1e-20,
        )  # fmt: skip
        state, rows = [got[5], want[5]], [got[7], want[7]]
        if at % ratio == ratio - 1:
            assert_same_bf16(got[6], want[6])
        else:
            assert got[6].isnan().all(), "a latent came out of a group that is not full"
            filled = at % ratio + 1
            assert_close(got[5][:, :filled], want[5][:, :filled], 1e-6)
        assert_same_grid(rows[0], rows[1], differing=1e-2)
    assert (rows[0][3] == 0).all()


@pytest.mark.parametrize(
    ("ratio", "width", "rotated"), [(1, 32, 16), (2, 96, 32), wide(2, 128, 64)]
)
def test_index_keys_are_written_when_a_group_is_full(ratio: int, width: int, rotated: int) -> None:
    for at in range(2 * ratio):
        turn = rotation(torch.tensor([at // ratio * ratio]), frequencies(rotated, 1.6e5, None))
        got, want = run_both(
            compressor.index_key_step, reference.index_key_step,
            torch.randn(2, 1, width), torch.rand(width), turn.cos, turn.sin, torch.tensor([at]),
            torch.zeros(3, width).to(torch.bfloat16), ratio=ratio, eps=1e-20,
        )  # fmt: skip
        assert_same_grid(got[5], want[5], differing=1e-2)
        assert (got[5].abs().sum() > 0) == (at % ratio == ratio - 1)


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rows", "block"),
    [(2, 4, 32, 150, 4), (1, 18, 96, 70, 8), wide(1, 32, 128, 40000, 8)],
)
def test_index_scores_match_with_and_without_candidates(
    tokens: int, heads: int, width: int, rows: int, block: int
) -> None:
    turn = rotation(torch.arange(tokens) + 9, frequencies(width // 2, 1.6e5, None))
    got, want = run_both(
        indexer.index_queries, reference.index_queries,
        torch.randn(tokens, heads, width).to(torch.bfloat16),
        torch.randn(tokens, heads).to(torch.bfloat16), turn.cos, turn.sin,
        poisoned(tokens, heads, width), poisoned(tokens, heads),
    )  # fmt: skip
    assert_same_grid(got[4], want[4])
    assert torch.equal(got[5], want[5])
    queries, weights = want[4], want[5]
    keys = round_trip_fp4_index(torch.randn(rows, width).to(torch.bfloat16))
    visible = torch.tensor([rows - 9, 0][:tokens], dtype=torch.int32)
    allowed = torch.randint(0, 2, (tokens, -(-rows // block)), dtype=torch.uint8)
    for candidates in (None, allowed):
        got, want = run_both(
            indexer.index_scores, reference.index_scores, queries, weights, keys, visible,
            candidates, torch.zeros(tokens, rows).to(torch.bfloat16), block_size=block,
        )  # fmt: skip
        for token, seen in enumerate(visible.tolist()):
            hidden = want[5][token, :seen] == -torch.inf
            assert torch.equal(got[5][token, :seen] == -torch.inf, hidden)
            assert_same_bf16(
                got[5][token, :seen][~hidden], want[5][token, :seen][~hidden], differing=1e-2
            )


CHOICES = [(3, 200, 24), (2, 40, 64), wide(2, 5000, 512), wide(1, 300000, 512)]


@pytest.mark.parametrize(("tokens", "rows", "wanted"), CHOICES)
def test_chosen_rows_are_the_best_and_the_oldest_of_equals(
    tokens: int, rows: int, wanted: int
) -> None:
    # Few distinct values, so that every cut falls into a run of equals; some -0 and some hidden.
    scores = (torch.randint(-6, 7, (tokens, rows)) * 0.25).to(torch.bfloat16)
    scores[:, ::7] = -torch.inf
    scores[:, 1::11] = -0.0
    visible = torch.tensor([rows, rows // 2 + 1, 0][:tokens], dtype=torch.int32)
    got, want = run_both(
        indexer.choose_rows, reference.choose_rows,
        scores, visible, poisoned(tokens, wanted, dtype=torch.int32) - 7,
    )  # fmt: skip
    assert torch.equal(got[2], want[2])


@pytest.mark.parametrize(
    ("rows", "block", "keep"), [(203, 4, 9), (64, 8, 100), wide(100001, 8, 2048)]
)
def test_candidate_blocks_are_the_best_and_always_the_newest(
    rows: int, block: int, keep: int
) -> None:
    scores = torch.randn(3, rows).to(torch.bfloat16)
    scores[:, : rows // 2] = 0.5
    visible = torch.tensor([rows, rows // 3 + 2, 0], dtype=torch.int32)
    scores[0, rows // block * block :] = -50.0  # the newest block is the worst, and kept
    got, want = run_both(
        indexer.choose_blocks, reference.choose_blocks,
        scores, visible, torch.zeros(3, -(-rows // block), dtype=torch.uint8),
        block_size=block, keep=keep,
    )  # fmt: skip
    assert torch.equal(got[2], want[2])


def test_every_kernel_has_a_reference_of_the_same_signature() -> None:
    from compute.kernels import triton_kernels

    for name in triton_kernels.__all__:
        kernel = list(inspect.signature(getattr(triton_kernels, name)).parameters)
        tuned = [parameter for parameter in kernel if parameter not in ("tile", "lines")]
        assert tuned == list(inspect.signature(getattr(reference, name)).parameters), name
    assert DEVICE.type in ("cpu", "cuda")
