"""Products with a vector that they normalize themselves: the first one of each sublayer.

Owns the rms norm in front of attention's down projections and of the gates. A norm is 10 KB to
read, so every program makes it anew, while its weights are on their way, instead of waiting for a
kernel that does. What later kernels want of the normalized vector, the programs of the first rows
write, each for its share of the columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.dense import (
    Tile,
    codes_at,
    columns_a_split,
    scaled_sums,
)
from compute.kernels.launching import PDL
from compute.kernels.limbs import Limbs, store_limbs
from compute.kernels.numeric import (
    as_bf16,
    release_next,
    round_trip_e4m3,
    to_bf16,
    wait_for_previous,
)

#: Columns of which a norm is summed at once.
STEP = 1024

# Measured on an H200 (`docs/kernels.md`).
FP8_TILE = Tile(16, 512, 4)
BF16_TILE = Tile(16, 512, 4)


@triton.jit
def _inverse_rms(x, eps, K: tl.constexpr, STEP: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of bf16 `x` [K]. Unrolled, so that all loads are under way at
    once."""
    total = tl.zeros((STEP,), tl.float32)
    for first in tl.static_range(0, K, STEP):
        column = first + tl.arange(0, STEP)
        v = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
        total += v * v
    return 1.0 / tl.sqrt_rn(tl.sum(total, axis=0) / K + eps)


@triton.jit
def _normed(x, norm, inverse, columns, end):
    """fp32 of bf16: the normalized vector at `columns`, zeros from `end` on."""
    v = tl.load(x + columns, mask=columns < end, other=0.0).to(tl.float32)
    w = tl.load(norm + columns, mask=columns < end, other=0.0).to(tl.float32)
    return to_bf16(v * inverse * w)


@triton.jit
def _rounded(y, WIDTH: tl.constexpr):
    return tl.reshape(round_trip_e4m3(tl.reshape(y, (WIDTH // 32, 32))), (WIDTH,))


@triton.jit
def _normed_fp8(
    x, norm, weight, scale, out, normed, row_count, share, eps,
    K: tl.constexpr, NORMED: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    inside = rows < row_count
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, K)
    tile_scales = scale + first // 32 * (K // 32)
    wait_for_previous()
    inverse = _inverse_rms(x, eps, K, STEP)
    acc = tl.zeros((ROWS, DEPTH // 16), tl.float32)
    for k in range(start, end, DEPTH):
        columns = k + tl.arange(0, DEPTH)
        codes = codes_at(weight, rows, inside, columns, end, K)
        y = _normed(x, norm, inverse, columns, end)
        if NORMED:
            tl.store(normed + columns, as_bf16(y), mask=columns < tl.where(first == 0, end, 0))
        acc += scaled_sums(codes, _rounded(y, DEPTH), tile_scales, k, end, ROWS, DEPTH)
    release_next()
    tl.store(out + tl.program_id(1) * row_count + rows, tl.sum(acc, axis=1), mask=inside)


@triton.jit
def _normed_bf16(
    x, norm, weight, out, rounded, limbs, limb_stride, sums, scales, row_count, share, eps,
    K: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < row_count
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, K)
    wait_for_previous()
    inverse = _inverse_rms(x, eps, K, STEP)
    acc = tl.zeros((ROWS, DEPTH // 8), tl.float32)
    for k in range(start, end, DEPTH):
        columns = k + tl.arange(0, DEPTH)
        w = tl.load(
            weight + rows[:, None].to(tl.int64) * K + columns[None, :],
            mask=inside[:, None] & (columns < end)[None, :],
            other=0.0,
        )
        products = w.to(tl.float32) * _normed(x, norm, inverse, columns, end)[None, :]
        acc += tl.sum(tl.reshape(products, (ROWS, DEPTH // 8, 8)), axis=2)
    release_next()
    tl.store(out + tl.program_id(1) * row_count + rows, tl.sum(acc, axis=1), mask=inside)
    if tl.program_id(0) == 0:
        for k in range(start, end, DEPTH):
            columns = k + tl.arange(0, DEPTH)
            y = _normed(x, norm, inverse, columns, end)
            tl.store(rounded + columns, as_bf16(_rounded(y, DEPTH)), mask=columns < end)
            store_limbs(y, columns < end, limbs, limb_stride, sums, scales, k, K, DEPTH)


def normed_fp8_matvec(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    normed: torch.Tensor | None = None,
    *,
    eps: float,
    tile: Tile = FP8_TILE,
) -> None:
    """Shares of an fp8 weight's product with one token, normalized and rounded.

    y = bf16(`norm` * x / sqrt(mean(x^2) + eps)) of bf16 `x` [1, K], `norm` [K]; `weight` uint8 [N,
    K] of e4m3 codes, `scale` uint8 [ceil(N/32), ceil(K/32)]; `out` fp32 [S, 1, N]: the share of
    each of S splits of K in the product with y quantized and dequantized. `normed` bf16 [1, K]
    takes y itself.
    """
    (rows, columns), splits = weight.shape, out.shape[0]
    _normed_fp8[(triton.cdiv(rows, tile.rows), splits)](
        x, norm, weight, scale, out, x if normed is None else normed, rows,
        columns_a_split(columns, splits, tile.depth), eps,
        K=columns, NORMED=normed is not None, STEP=STEP, ROWS=tile.rows, DEPTH=tile.depth,
        num_warps=tile.warps, **PDL,
    )  # fmt: skip


def normed_bf16_matvec(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    rounded: torch.Tensor,
    limbs: Limbs,
    *,
    eps: float,
    tile: Tile = BF16_TILE,
) -> None:
    """Shares of a bf16 weight's product with one normalized token, and the token for others.

    y as in `normed_fp8_matvec`; `weight` bf16 [N, K]; `out` fp32 [S, 1, N]: the share of each of S
    splits of K. `rounded` bf16 [1, K] takes y quantized and dequantized, `limbs` quantized for fp4
    products.
    """
    (rows, columns), splits = weight.shape, out.shape[0]
    _normed_bf16[(triton.cdiv(rows, tile.rows), splits)](
        x, norm, weight, out, rounded, limbs.bytes, limbs.bytes.stride(0), limbs.sums, limbs.scales,
        rows, columns_a_split(columns, splits, tile.depth), eps,
        K=columns, STEP=STEP, ROWS=tile.rows, DEPTH=tile.depth, num_warps=tile.warps, **PDL,
    )  # fmt: skip
