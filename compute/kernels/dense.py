"""Products with the dense weights for a few tokens: fp8 in 32x32 tiles, and plain bf16.

Owns the matrix-vector kernels of a decode step. One program owns a tile of rows and walks its share
of K with asynchronous copies into shared memory; weights are decoded in the registers that feed the
tensor cores, whose other operand is the tokens' columns. Results of one token do not depend on how
many tokens share the launch: the additions along K are the same ones in the same order.

A power-of-two scale never changes a mantissa, so the tile's scale multiplies the activations (32
times fewer than the weights), and both products are exact: only the order of additions differs from
a product of codes. Range: |activation * tile scale| below 2^67.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.numeric import (
    PORTABLE,
    as_bf16,
    decode_e4m3,
    decode_e4m3_pairs,
    pair_order,
    power_of_two,
    prefetch_rows,
    release_next,
    round_trip_e4m3,
    swiglu,
    to_bf16,
    wait_for_previous,
)

#: Columns of the tensor-core tile, so the most tokens one launch takes.
MOST_TOKENS = 8


class Tile(NamedTuple):
    """Rows and columns of weights a program holds at once, and how the program is scheduled."""

    rows: int
    depth: int
    warps: int
    stages: int


@triton.jit
def _fp8_operand(codes):
    if PORTABLE:
        return decode_e4m3(codes)
    else:
        return decode_e4m3_pairs(codes)


@triton.jit
def _operand_order(k):
    if PORTABLE:
        return k
    else:
        return pair_order(k)


@triton.jit
def _scaled_tokens(
    x, scale, k, end, x_stride, T: tl.constexpr, C: tl.constexpr, LIFT: tl.constexpr
):
    """[len(k), C] activations at columns `k` times the tiles' scales and 2^LIFT; one token fills all C."""
    inside = k < end
    s = power_of_two(tl.load(scale + k // 32, mask=inside, other=0)) * LIFT
    if T == 1:
        column = tl.load(x + k, mask=inside, other=0.0).to(tl.float32) * s
        return tl.broadcast_to(column[:, None], (k.shape[0], C))
    else:
        t = tl.arange(0, C)
        values = tl.load(
            x + t[None, :] * x_stride + k[:, None],
            mask=inside[:, None] & (t[None, :] < T),
            other=0.0,
        )
        return values.to(tl.float32) * s[:, None]


@triton.jit
def fp8_rows(
    x,
    x_stride,
    weight,
    scale,
    rows,
    tile_row,
    row_count,
    start,
    end,
    K: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 [ROWS, C]: `rows` of an fp8 weight times the tokens, over columns start..end."""
    LIFT: tl.constexpr = 1.0 if PORTABLE else 2.0**60
    columns = tl.arange(0, DEPTH)
    order = _operand_order(columns)
    tile_scales = scale + tile_row * (K // 32)
    acc = tl.zeros((ROWS, C), tl.float32)
    tokens = _scaled_tokens(x, tile_scales, start + order, end, x_stride, T, C, LIFT)
    for k in tl.range(start, end, DEPTH, num_stages=STAGES):
        codes = tl.load(
            weight + rows[:, None].to(tl.int64) * K + (k + columns)[None, :],
            mask=(rows < row_count)[:, None] & (k + columns < end)[None, :],
            other=0,
        )
        # Loaded one round ahead: these loads are too narrow for the asynchronous copies.
        upcoming = _scaled_tokens(x, tile_scales, k + DEPTH + order, end, x_stride, T, C, LIFT)
        operand = _fp8_operand(codes)
        acc = tl.dot(operand, tokens.to(operand.dtype), acc, input_precision="ieee")
        tokens = upcoming
    return acc * LIFT


@triton.jit
def mix_streams(
    y,
    columns,
    inside,
    streams,
    post,
    comb,
    pre,
    collapsed,
    H: tl.constexpr,
    HC: tl.constexpr,
):
    """Put sublayer output `y` (fp32 of bf16) back into one token's streams, in place, and collapse them.

    S'_j = bf16(post_j y + sum_i comb_ij S_i); collapsed = bf16(sum_j pre_j S'_j).
    """
    total = tl.zeros(y.shape, tl.float32)
    old = (
        tl.load(streams + columns, mask=inside, other=0.0).to(tl.float32),
        tl.load(streams + H + columns, mask=inside, other=0.0).to(tl.float32),
        tl.load(streams + 2 * H + columns, mask=inside, other=0.0).to(tl.float32),
        tl.load(streams + 3 * H + columns, mask=inside, other=0.0).to(tl.float32),
    )
    tl.static_assert(HC == 4, "the streams are four")
    for j in tl.static_range(HC):
        new = tl.load(post + j) * y
        for i in tl.static_range(HC):
            new += tl.load(comb + i * HC + j) * old[i]
        tl.store(streams + j * H + columns, as_bf16(new), mask=inside)
        total += tl.load(pre + j) * to_bf16(new)
    tl.store(collapsed + columns, as_bf16(total), mask=inside)


#: What a kernel does with its rows' sums.
BF16_OUT = tl.constexpr(0)
PARTIAL_OUT = tl.constexpr(1)  # fp32, one share of K of several
ROUNDED_OUT = tl.constexpr(2)  # bf16 on the quantization grid
STREAMS_OUT = tl.constexpr(3)  # back into the residual streams
PICKS_OUT = tl.constexpr(4)  # bf16, each routed expert by itself


@triton.jit
def _fp8_matvec(
    x, x_stride, weight, scale, out, row_count, share, streams, post, comb, pre,
    K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, GROUP_ROWS: tl.constexpr,
    OUT: tl.constexpr, HC: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr,
   
):  # fmt: skip
    release_next()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < row_count
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, K)
    prefetch_rows(weight, rows, K, inside, start, end, LINES)
    wait_for_previous()
    group = tl.program_id(0) * ROWS // GROUP_ROWS
    acc = fp8_rows(
        x + group * K, x_stride, weight, scale, rows, tl.program_id(0) * ROWS // 32, row_count,
        start, end, K, T, C, ROWS, DEPTH, STAGES,
    )  # fmt: skip
    if OUT == STREAMS_OUT:
        # All C columns hold the one token's result, so the greatest of them is any of them.
        y = to_bf16(tl.max(acc, axis=1))
        mix_streams(y, rows, inside, streams, post, comb, pre, out, row_count, HC)
    else:
        t = tl.arange(0, C)
        at = t[None, :] * row_count + rows[:, None]
        mask = inside[:, None] & (t[None, :] < T)
        if OUT == PARTIAL_OUT:
            tl.store(out + tl.program_id(1) * T * row_count + at, acc, mask=mask)
        elif OUT == ROUNDED_OUT:
            rounded = tl.trans(round_trip_e4m3(tl.trans(to_bf16(acc))))
            tl.store(out + at, rounded.to(tl.bfloat16), mask=mask)
        else:
            tl.store(out + at, as_bf16(acc), mask=mask)


@triton.jit
def _fp8_gate_up(
    x, x_stride, gate, gate_scale, up, up_scale, out, row_count, limit,
    K: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr,
   
):  # fmt: skip
    release_next()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < row_count
    tile_row = tl.program_id(0) * ROWS // 32
    prefetch_rows(gate, rows, K, inside, 0, K, LINES)
    prefetch_rows(up, rows, K, inside, 0, K, LINES)
    wait_for_previous()
    g = fp8_rows(
        x, x_stride, gate, gate_scale, rows, tile_row, row_count, 0, K,
        K, T, C, ROWS, DEPTH, STAGES,
    )  # fmt: skip
    u = fp8_rows(
        x, x_stride, up, up_scale, rows, tile_row, row_count, 0, K,
        K, T, C, ROWS, DEPTH, STAGES,
    )  # fmt: skip
    a = to_bf16(swiglu(g, u, limit))
    rounded = tl.trans(round_trip_e4m3(tl.trans(a)))
    t = tl.arange(0, C)
    at = t[None, :] * row_count + rows[:, None]
    tl.store(out + at, rounded.to(tl.bfloat16), mask=inside[:, None] & (t[None, :] < T))


@triton.jit
def _bf16_matvec(
    x, x_stride, weight, out, row_count, share,
    K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr,
   
):  # fmt: skip
    release_next()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < row_count
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, K)
    prefetch_rows(
        weight.to(tl.pointer_type(tl.uint8)), rows, 2 * K, inside, 2 * start, 2 * end,
        LINES,
    )  # fmt: skip
    wait_for_previous()
    t = tl.arange(0, C)
    acc = tl.zeros((ROWS, C), tl.float32)
    for k0 in tl.range(start, end, DEPTH, num_stages=STAGES):
        k = k0 + tl.arange(0, DEPTH)
        w = tl.load(
            weight + rows[:, None].to(tl.int64) * K + k[None, :],
            mask=inside[:, None] & (k < end)[None, :],
            other=0.0,
        )
        if T == 1:
            column = tl.load(x + k, mask=k < end, other=0.0)
            tokens = tl.broadcast_to(column[:, None], (DEPTH, C))
        else:
            tokens = tl.load(
                x + t[None, :] * x_stride + k[:, None],
                mask=(k < end)[:, None] & (t[None, :] < T),
                other=0.0,
            )
        if PORTABLE:
            acc += tl.dot(w.to(tl.float32), tokens.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(w, tokens, acc)
    at = t[None, :] * row_count + rows[:, None]
    mask = inside[:, None] & (t[None, :] < T)
    if OUT == PARTIAL_OUT:
        tl.store(out + tl.program_id(1) * T * row_count + at, acc, mask=mask)
    else:
        tl.store(out + at, as_bf16(acc), mask=mask)


def _share(columns: int, splits: int, depth: int) -> int:
    """Columns of one split: all equal but the last, and whole rounds of the kernel's loop."""
    return triton.cdiv(triton.cdiv(columns, splits), depth) * depth


def _check_tokens(x: torch.Tensor) -> int:
    tokens = x.shape[0]
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{tokens} tokens, a matrix-vector product takes 1 to {MOST_TOKENS}")
    return tokens


def fp8_matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    *,
    groups: int = 1,
    round_trip: bool = False,
    tile: Tile = Tile(32, 256, 4, 4),
    lines: int = 4,
) -> None:
    """`out` = `x` times an fp8 weight, for up to 8 tokens.

    `x` bf16 [T, groups * K], rounded already where the model quantizes it; `weight` uint8 [N, K] of
    e4m3 codes and `scale` uint8 [ceil(N/32), ceil(K/32)]. Row block g of `groups` equal ones meets
    columns g*K.. of `x`. `out` is bf16 [T, N] (with `round_trip` quantized and dequantized in groups
    of 32), or fp32 [S, T, N]: the share of each of S splits of K, for the next kernel to add in order.
    """
    tokens, (rows, columns) = _check_tokens(x), weight.shape
    partial = out.dtype == torch.float32
    splits = out.shape[0] if partial else 1
    _fp8_matvec[(triton.cdiv(rows, tile.rows), splits)](
        x, x.stride(0), weight, scale, out, rows, _share(columns, splits, tile.depth),
        out, out, out, out,
        K=columns, T=tokens, C=MOST_TOKENS, GROUP_ROWS=rows // groups,
        OUT=PARTIAL_OUT if partial else ROUNDED_OUT if round_trip else BF16_OUT, HC=4,
        ROWS=tile.rows, DEPTH=tile.depth, STAGES=tile.stages, LINES=lines,
        num_warps=tile.warps, **PDL,
    )  # fmt: skip


def fp8_matvec_to_streams(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    collapsed: torch.Tensor,
    *,
    tile: Tile = Tile(32, 256, 4, 4),
    lines: int = 4,
) -> None:
    """One token's sublayer output y = `x` times an fp8 weight, put back into the streams at once.

    `x` bf16 [1, K]; `streams` bf16 [1, hc, N], changed in place to bf16(post_j y + sum_i comb_ij S_i);
    `collapsed` bf16 [1, N] = bf16(sum_j pre_j S'_j). `post`, `pre` fp32 [1, hc], `comb` fp32 [1, hc, hc].
    """
    rows, columns = weight.shape
    _fp8_matvec[(triton.cdiv(rows, tile.rows), 1)](
        x, x.stride(0), weight, scale, collapsed, rows, columns, streams, post, comb, pre,
        K=columns, T=1, C=MOST_TOKENS, GROUP_ROWS=rows, OUT=STREAMS_OUT, HC=streams.shape[1],
        ROWS=tile.rows, DEPTH=tile.depth, STAGES=tile.stages, LINES=lines,
        num_warps=tile.warps, **PDL,
    )  # fmt: skip


def fp8_gate_up(
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scale: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    limit: float,
    tile: Tile = Tile(32, 256, 4, 4),
    lines: int = 4,
) -> None:
    """The shared expert's gate, up, clamped SwiGLU and the rounding its down product takes.

    `x` bf16 [T, K] rounded; weights uint8 [I, K], scales [I/32, K/32]; `out` bf16 [T, I].
    """
    tokens, (rows, columns) = _check_tokens(x), gate.shape
    _fp8_gate_up[(triton.cdiv(rows, tile.rows),)](
        x, x.stride(0), gate, gate_scale, up, up_scale, out, rows, limit,
        K=columns, T=tokens, C=MOST_TOKENS,
        ROWS=tile.rows, DEPTH=tile.depth, STAGES=tile.stages, LINES=lines,
        num_warps=tile.warps, **PDL,
    )  # fmt: skip


def bf16_matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    tile: Tile = Tile(32, 128, 2, 4),
    lines: int = 4,
) -> None:
    """`out` = bf16 `x` [T, K] times a bf16 `weight` [N, K], accumulated in fp32, for up to 8 tokens.

    `out` bf16 [T, N], or fp32 [S, T, N] as in `fp8_matvec` (S = 1 gives the unrounded product).
    """
    tokens, (rows, columns) = _check_tokens(x), weight.shape
    partial = out.dtype == torch.float32
    splits = out.shape[0] if partial else 1
    _bf16_matvec[(triton.cdiv(rows, tile.rows), splits)](
        x, x.stride(0), weight, out, rows, _share(columns, splits, tile.depth),
        K=columns, T=tokens, C=MOST_TOKENS, OUT=PARTIAL_OUT if partial else BF16_OUT,
        ROWS=tile.rows, DEPTH=tile.depth, STAGES=tile.stages, LINES=lines,
        num_warps=tile.warps, **PDL,
    )  # fmt: skip
