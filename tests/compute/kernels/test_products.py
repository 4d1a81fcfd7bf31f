"""Matrix-vector products against float64: fp8, bf16 and routed fp4 experts."""

from __future__ import annotations

import pytest
import torch

from compute.formats import round_trip_fp8
from compute.kernels import dense, experts, reference
from compute.kernels import normed as normed_products
from tests.compute.kernels.comparing import (
    DEVICE,
    assert_close,
    assert_same_bf16,
    assert_same_grid,
    empty_limbs,
    expert_table,
    fp8_weight,
    poisoned,
    run_both,
)

SMALL = dense.Tile(32, 64, 2)
gpu = pytest.mark.gpu


def wide(*values: object) -> object:
    return pytest.param(*values, marks=gpu)


def activations(tokens: int, width: int) -> torch.Tensor:
    return round_trip_fp8((torch.randn(tokens, width) * 3).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "groups"),
    [
        (1, 72, 160, 1),  # rows that fill no tile, columns that fill no round
        (3, 64, 96, 2),
        (8, 32, 32, 1),
        wide(1, 32768, 1280, 1),
        wide(6, 8192, 4096, 8),
        wide(1, 5120, 8192, 1),
        wide(1, 1000, 5152, 1),
    ],
)
def test_fp8_product_is_the_exact_sum_rounded_once(
    tokens: int, rows: int, columns: int, groups: int
) -> None:
    x = activations(tokens, groups * columns)
    codes, scales = fp8_weight(rows, columns)
    options = {} if DEVICE.type == "cuda" else {"tile": SMALL}
    got, want = run_both(
        dense.fp8_matvec, reference.fp8_matvec, x, codes, scales, poisoned(tokens, rows),
        groups=groups, options=options,
    )  # fmt: skip
    assert_same_bf16(got[3], want[3])
    if rows % 32 == 0:
        got, want = run_both(
            dense.fp8_matvec, reference.fp8_matvec, x, codes, scales, poisoned(tokens, rows),
            groups=groups, round_trip=True, options=options,
        )  # fmt: skip
        assert_same_grid(got[3], want[3])


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "splits"),
    [(2, 48, 160, 3), (1, 32, 96, 2), wide(1, 1792, 5120, 4), wide(8, 1792, 5120, 5)],
)
def test_split_fp8_product_adds_up_to_the_whole(
    tokens: int, rows: int, columns: int, splits: int
) -> None:
    x, (codes, scales) = activations(tokens, columns), fp8_weight(rows, columns)
    tile = dense.Tile(32, 32, 2, 2) if DEVICE.type == "cpu" else dense.Tile(32, 256, 4, 3)
    out = poisoned(splits, tokens, rows, dtype=torch.float32)
    got, want = run_both(
        dense.fp8_matvec, reference.fp8_matvec, x, codes, scales, out, options={"tile": tile}
    )
    assert_close(got[3].double().sum(0), want[3].double().sum(0), 1e-6)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "splits"),
    [(1, 24, 160, 3), (3, 40, 96, 1), wide(1, 384, 5120, 10), wide(4, 512, 5120, 8)],
)
def test_bf16_product_keeps_fp32_sums(tokens: int, rows: int, columns: int, splits: int) -> None:
    x = torch.randn(tokens, columns).to(torch.bfloat16)
    weight = torch.randn(rows, columns).to(torch.bfloat16)
    options = {} if DEVICE.type == "cuda" else {"tile": dense.Tile(16, 32, 2, 2)}
    out = poisoned(splits, tokens, rows, dtype=torch.float32)
    got, want = run_both(dense.bf16_matvec, reference.bf16_matvec, x, weight, out, options=options)
    # The tensor cores cut off what an addition shifts out.
    assert_close(got[2].double().sum(0), want[2].double().sum(0), 3e-6)
    got, want = run_both(
        dense.bf16_matvec, reference.bf16_matvec, x, weight, poisoned(tokens, rows), options=options
    )
    assert_same_bf16(got[2], want[2], differing=3e-3)


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "limit"),
    [
        (1, 64, 96, 10.0),
        (2, 32, 160, 0.5),
        (1, 32, 96, 0.0),  # no limit
        wide(1, 2304, 5120, 10.0),
        wide(5, 2304, 5120, 0.5),
    ],
)
def test_shared_expert_clamps_and_rounds_for_its_down_product(
    tokens: int, rows: int, columns: int, limit: float
) -> None:
    x = activations(tokens, columns)
    options = {} if DEVICE.type == "cuda" else {"tile": SMALL}
    got, want = run_both(
        dense.fp8_gate_up, reference.fp8_gate_up,
        x, *fp8_weight(rows, columns), *fp8_weight(rows, columns), poisoned(tokens, rows),
        limit=limit, options=options,
    )  # fmt: skip
    assert_same_grid(got[5], want[5])


def mixes(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, 4), torch.rand(tokens, 4, 4), torch.rand(tokens, 4)


@pytest.mark.parametrize(("rows", "columns"), [(72, 96), wide(5120, 8192)])
def test_product_put_back_into_streams_equals_product_then_put_back(
    rows: int, columns: int
) -> None:
    x, (codes, scales) = activations(1, columns), fp8_weight(rows, columns)
    streams = (torch.randn(1, 4, rows) * 20).to(torch.bfloat16)
    options = {} if DEVICE.type == "cuda" else {"tile": SMALL}
    got, want = run_both(
        dense.fp8_matvec_to_streams, reference.fp8_matvec_to_streams,
        x, codes, scales, streams, *mixes(1), poisoned(1, rows), options=options,
    )  # fmt: skip
    assert_same_bf16(got[3], want[3])
    assert_same_bf16(got[7], want[7])


@pytest.mark.parametrize(
    ("rows", "columns", "splits", "normed"),
    [
        (48, 160, 3, True),
        (24, 96, 1, False),
        wide(1792, 5120, 5, True),
        wide(1792, 5120, 5, False),
    ],
)
def test_product_with_a_norm_of_its_own_equals_norm_then_product(
    rows: int, columns: int, splits: int, normed: bool
) -> None:
    x, (codes, scales) = (torch.randn(1, columns) * 7).to(torch.bfloat16), fp8_weight(rows, columns)
    options = {} if DEVICE.type == "cuda" else {"tile": dense.Tile(16, 64, 2)}
    got, want = run_both(
        normed_products.normed_fp8_matvec, reference.normed_fp8_matvec,
        x, torch.rand(columns), codes, scales, poisoned(splits, 1, rows, dtype=torch.float32),
        poisoned(1, columns) if normed else None, eps=1e-20, options=options,
    )  # fmt: skip
    # One rounding of the vector moves every row by a step of one of its columns.
    assert_close(got[4].double().sum(0), want[4].double().sum(0), 2e-3)
    if normed:
        assert_same_bf16(got[5], want[5])


@pytest.mark.parametrize(
    ("rows", "columns", "splits"),
    [(24, 160, 3), (40, 96, 1), wide(768, 5120, 10), wide(384, 5120, 10)],
)
def test_gates_norm_their_token_and_leave_it_for_the_experts(
    rows: int, columns: int, splits: int
) -> None:
    x = (torch.randn(1, columns) * 7).to(torch.bfloat16)
    options = {} if DEVICE.type == "cuda" else {"tile": dense.Tile(16, 32, 2, 2)}
    got, want = run_both(
        normed_products.normed_bf16_matvec, reference.normed_bf16_matvec,
        x, torch.rand(columns), torch.randn(rows, columns).to(torch.bfloat16),
        poisoned(splits, 1, rows, dtype=torch.float32), poisoned(1, columns),
        empty_limbs(1, columns), eps=1e-20, options=options,
    )  # fmt: skip
    assert_close(got[3].double().sum(0), want[3].double().sum(0), 1e-3)
    assert_same_grid(got[4], want[4])
    # The limbs stand for what the round trip gives, bit for bit.
    assert torch.equal(reference.values_of(got[5]), got[4].float())


EXPERT_SIZES = [
    (1, 2, 160, 64, 10.0),
    (2, 1, 96, 32, 0.5),
    (1, 1, 96, 32, 0.0),  # no limit
    wide(1, 6, 5120, 2304, 10.0),
    wide(3, 6, 5120, 2304, 0.5),
]


@pytest.mark.parametrize(("tokens", "count", "hidden", "intermediate", "limit"), EXPERT_SIZES)
def test_routed_experts_from_packed_bytes_equal_the_dequantized_ones(
    tokens: int, count: int, hidden: int, intermediate: int, limit: float
) -> None:
    picks = torch.stack([torch.randperm(count + 1)[:count].sort().values for _ in range(tokens)])
    table, _alive, on_cpu = expert_table(count + 1, hidden, intermediate, picks, DEVICE)
    x, weights = empty_limbs(tokens, hidden), torch.rand(tokens, count)
    reference.quantize((torch.randn(tokens, hidden) * 3).to(torch.bfloat16), None, x)
    options = {} if DEVICE.type == "cuda" else {"tile": dense.Tile(64, 16, 1)}
    got, want = run_both(
        experts.experts_gate_up, reference.experts_gate_up,
        x, table, weights, poisoned(tokens * count, intermediate), limit=limit,
        reference_arguments={1: on_cpu}, options=options,
    )  # fmt: skip
    assert_same_bf16(got[3], want[3])

    a = empty_limbs(tokens * count, intermediate)
    reference.quantize(want[3], None, a)
    got, want = run_both(
        experts.experts_down, reference.experts_down, a, table, poisoned(tokens, count, hidden),
        reference_arguments={1: on_cpu}, options=options,
    )  # fmt: skip
    assert_same_bf16(got[2], want[2])


@pytest.mark.parametrize(("rows", "columns"), [(32, 96), wide(4096, 1280)])
def test_a_token_gets_the_same_bits_alone_and_in_company(rows: int, columns: int) -> None:
    x, (codes, scales) = activations(8, columns), fp8_weight(rows, columns)
    x, codes, scales = x.to(DEVICE), codes.to(DEVICE), scales.to(DEVICE)
    together = torch.empty(8, rows, dtype=torch.bfloat16, device=DEVICE)
    alone = torch.empty(1, rows, dtype=torch.bfloat16, device=DEVICE)
    dense.fp8_matvec(x, codes, scales, together)
    dense.fp8_matvec(x[3:4], codes, scales, alone)
    assert torch.equal(together[3:4], alone)
