"""Products with the dense weights for a few tokens: fp8 in 32x32 tiles, and plain bf16.

Owns the matrix-vector kernels of a decode step, which have one job: keep enough of the weights on
their way. An fp8 program loads 16 bytes a thread straight into registers, one row a warp at a time,
and sums with fp32 FMAs: no shared memory and no barrier stands between one load and the next, and
16 neighbouring products share one tile scale. Weights wider than that (bf16) go through
asynchronous copies and the tensor cores. Both products are exact, so only the order of additions is
ours. Each token is a program of its own, neighbours sharing the weights through the L2: its bits do
not depend on how many tokens share the launch.
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
    power_of_two,
    release_next,
    round_trip_e4m3,
    swiglu,
    swiglu_bound,
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
    stages: int = 1


BF16_TILE = Tile(16, 128, 1, 4)
GATE_UP_TILE = Tile(32, 1024, 16)


@triton.jit
def decoded(codes):
    """fp32 of uint8 e4m3 `codes`: one conversion instruction for two, where there is one."""
    if PORTABLE:
        return decode_e4m3(codes)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def codes_at(weight, rows, inside, columns, end, K: tl.constexpr):
    return tl.load(
        weight + rows[:, None].to(tl.int64) * K + columns[None, :],
        mask=inside[:, None] & (columns < end)[None, :],
        other=0,
    )


@triton.jit
def scaled_sums(codes, token, tile_scales, k, end, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """fp32 [ROWS, DEPTH / 16]: products summed by 16 columns, which lie in one tile, times its
    scale.
    """
    products = tl.reshape(decoded(codes) * token[None, :], (ROWS, DEPTH // 16, 16))
    block = k // 16 + tl.arange(0, DEPTH // 16)
    scale = power_of_two(tl.load(tile_scales + block // 2, mask=block * 16 < end, other=0))
    return tl.sum(products, axis=2) * scale[None, :]


@triton.jit
def fp8_rows(
    x, weight, scale, rows, inside, start, end,
    K: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS]: `rows` (all of one tile row) of an fp8 weight times one token, columns
    start..end.
    """
    tile_scales = scale + tl.program_id(1) * ROWS // 32 * (K // 32)
    acc = tl.zeros((ROWS, DEPTH // 16), tl.float32)
    for k in range(start, end, DEPTH):
        columns = k + tl.arange(0, DEPTH)
        codes = codes_at(weight, rows, inside, columns, end, K)
        token = tl.load(x + columns, mask=columns < end, other=0.0).to(tl.float32)
        acc += scaled_sums(codes, token, tile_scales, k, end, ROWS, DEPTH)
    return tl.sum(acc, axis=1)


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
    """Put sublayer output `y` (fp32 of bf16) back into one token's streams, in place, and collapse
    them.

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


@triton.jit
def _fp8_matvec(
    x, x_stride, weight, scale, out, row_count, share, streams, post, comb, pre,
    K: tl.constexpr, GROUP_ROWS: tl.constexpr, OUT: tl.constexpr, HC: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    token, tokens = tl.program_id(0), tl.num_programs(0)
    first = tl.program_id(1) * ROWS
    rows = first + tl.arange(0, ROWS)
    inside = rows < row_count
    start = tl.program_id(2) * share
    end = tl.minimum(start + share, K)
    wait_for_previous()
    x += token * x_stride + first // GROUP_ROWS * K
    acc = fp8_rows(x, weight, scale, rows, inside, start, end, K, ROWS, DEPTH)
    release_next()
    if OUT == STREAMS_OUT:
        y = to_bf16(acc)
        mix_streams(y, rows, inside, streams, post, comb, pre, out, row_count, HC)
    elif OUT == PARTIAL_OUT:
        at = (tl.program_id(2) * tokens + token) * row_count + rows
        tl.store(out + at, acc, mask=inside)
    elif OUT == ROUNDED_OUT:
        y = tl.reshape(round_trip_e4m3(tl.reshape(to_bf16(acc), (ROWS // 32, 32))), (ROWS,))
        tl.store(out + token * row_count + rows, as_bf16(y), mask=inside)
    else:
        tl.store(out + token * row_count + rows, as_bf16(acc), mask=inside)


@triton.jit
def _fp8_gate_up(
    x, x_stride, gate, gate_scale, up, up_scale, out, row_count, limit,
    K: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = rows < row_count
    wait_for_previous()
    x += tl.program_id(0) * x_stride
    tile = tl.program_id(1) * ROWS // 32 * (K // 32)
    g = tl.zeros((ROWS, DEPTH // 16), tl.float32)
    u = tl.zeros((ROWS, DEPTH // 16), tl.float32)
    for k in range(0, K, DEPTH):
        columns = k + tl.arange(0, DEPTH)
        gate_codes = codes_at(gate, rows, inside, columns, K, K)
        up_codes = codes_at(up, rows, inside, columns, K, K)
        token = tl.load(x + columns, mask=columns < K, other=0.0).to(tl.float32)
        g += scaled_sums(gate_codes, token, gate_scale + tile, k, K, ROWS, DEPTH)
        u += scaled_sums(up_codes, token, up_scale + tile, k, K, ROWS, DEPTH)
    release_next()
    a = to_bf16(swiglu(tl.sum(g, axis=1), tl.sum(u, axis=1), limit))
    rounded = tl.reshape(round_trip_e4m3(tl.reshape(a, (ROWS // 32, 32))), (ROWS,))
    tl.store(out + tl.program_id(0) * row_count + rows, as_bf16(rounded), mask=inside)


@triton.jit
def _bf16_matvec(
    x, x_stride, weight, out, row_count, share,
    K: tl.constexpr, T: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,

):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < row_count
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, K)
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
    release_next()
    at = t[None, :] * row_count + rows[:, None]
    mask = inside[:, None] & (t[None, :] < T)
    if OUT == PARTIAL_OUT:
        tl.store(out + tl.program_id(1) * T * row_count + at, acc, mask=mask)
    else:
        tl.store(out + at, as_bf16(acc), mask=mask)


def fp8_tile(columns: int, splits: int = 1, round_trip: bool = False) -> Tile:
    """The tile of an fp8 product, by its share of K: as much of each row in flight as fits.

    Measured on an H200 (`docs/kernels.md`). Rounding needs a quantization group's 32 rows at hand.
    """
    if round_trip:
        return Tile(32, 1024, 16)
    share = triton.cdiv(columns, splits)
    for depth in (2048, 1024):
        if share % depth == 0:
            return Tile(8, depth, 4)
    return Tile(16, 512, 4)


def columns_a_split(columns: int, splits: int, depth: int) -> int:
    """Columns of one split: all equal but the last, and whole rounds of the kernel's loop."""
    rounds: int = triton.cdiv(triton.cdiv(columns, splits), depth)
    return rounds * depth


def _check_tokens(x: torch.Tensor) -> int:
    tokens: int = x.shape[0]
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
    tile: Tile | None = None,
) -> None:
    """`out` = `x` times an fp8 weight, for up to 8 tokens.

    `x` bf16 [T, groups * K], rounded already where the model quantizes it; `weight` uint8 [N, K] of
    e4m3 codes and `scale` uint8 [ceil(N/32), ceil(K/32)]. Row block g of `groups` equal ones meets
    columns g*K.. of `x`. `out` is bf16 [T, N] (with `round_trip` quantized and dequantized in
    groups of 32), or fp32 [S, T, N]: the share of each of S splits of K, for the next kernel to add
    in order.
    """
    tokens, (rows, columns) = _check_tokens(x), weight.shape
    partial = out.dtype == torch.float32
    splits = out.shape[0] if partial else 1
    tile = tile or fp8_tile(columns, splits, round_trip)
    _fp8_matvec[(tokens, triton.cdiv(rows, tile.rows), splits)](
        x, x.stride(0), weight, scale, out, rows, columns_a_split(columns, splits, tile.depth),
        out, out, out, out,
        K=columns, GROUP_ROWS=rows // groups,
        OUT=PARTIAL_OUT if partial else ROUNDED_OUT if round_trip else BF16_OUT, HC=4,
        ROWS=tile.rows, DEPTH=tile.depth, num_warps=tile.warps, **PDL,
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
    tile: Tile | None = None,
) -> None:
    """One token's sublayer output y = `x` times an fp8 weight, put back into the streams at once.

    `x` bf16 [1, K]; `streams` bf16 [1, hc, N], changed in place to bf16(post_j y + sum_i comb_ij
    S_i); `collapsed` bf16 [1, N] = bf16(sum_j pre_j S'_j). `post`, `pre` fp32 [1, hc], `comb` fp32
    [1, hc, hc].
    """
    rows, columns = weight.shape
    tile = tile or fp8_tile(columns)
    _fp8_matvec[(1, triton.cdiv(rows, tile.rows), 1)](
        x, x.stride(0), weight, scale, collapsed, rows, columns, streams, post, comb, pre,
        K=columns, GROUP_ROWS=rows, OUT=STREAMS_OUT, HC=streams.shape[1],
        ROWS=tile.rows, DEPTH=tile.depth, num_warps=tile.warps, **PDL,
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
    tile: Tile = GATE_UP_TILE,
) -> None:
    """The shared expert's gate, up, clamped SwiGLU and the rounding its down product takes.

    `x` bf16 [T, K] rounded; weights uint8 [I, K], scales [I/32, K/32]; `out` bf16 [T, I].
    """
    tokens, (rows, columns) = _check_tokens(x), gate.shape
    _fp8_gate_up[(tokens, triton.cdiv(rows, tile.rows))](
        x, x.stride(0), gate, gate_scale, up, up_scale, out, rows, swiglu_bound(limit),
        K=columns, ROWS=tile.rows, DEPTH=tile.depth,
        num_warps=tile.warps, **PDL,
    )  # fmt: skip


def bf16_matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    tile: Tile = BF16_TILE,
) -> None:
    """`out` = bf16 `x` [T, K] times a bf16 `weight` [N, K], accumulated in fp32, for up to 8
    tokens.

    `out` bf16 [T, N], or fp32 [S, T, N] as in `fp8_matvec` (S = 1 gives the unrounded product).
    """
    tokens, (rows, columns) = _check_tokens(x), weight.shape
    partial = out.dtype == torch.float32
    splits = out.shape[0] if partial else 1
    _bf16_matvec[(triton.cdiv(rows, tile.rows), splits)](
        x, x.stride(0), weight, out, rows, columns_a_split(columns, splits, tile.depth),
        K=columns, T=tokens, C=MOST_TOKENS, OUT=PARTIAL_OUT if partial else BF16_OUT,
        ROWS=tile.rows, DEPTH=tile.depth, STAGES=tile.stages,
        num_warps=tile.warps, **PDL,
    )  # fmt: skip
