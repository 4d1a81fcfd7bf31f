"""Routed experts straight from their packed fp4 bytes, wherever those lie.

Owns the two kernels of the routed experts. Both take a table of addresses, six a pick (gate, gate
scale, up, up scale, down, down scale), each in device memory or in registered host memory: where an
expert lies never chooses the arithmetic. Codes are decoded eight a register in front of the tensor
cores and carry their row's scale; the other operand is the one token in every column. All products
are exact, so only the order of additions is ours: along K in the order of the loop, over the picks in
ascending expert id. Range: weight scales at most 2^41.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.dense import BF16_OUT, PICKS_OUT, STREAMS_OUT, Tile, mix_streams
from compute.kernels.launching import PDL
from compute.kernels.numeric import (
    PORTABLE,
    as_bf16,
    decode_e2m1,
    decode_e2m1_pairs,
    pair_order,
    power_of_two,
    release_next,
    round_trip_e4m3,
    swiglu,
    to_bf16,
    wait_for_previous,
)

GATE, GATE_SCALE, UP, UP_SCALE, DOWN, DOWN_SCALE = range(6)
#: Addresses a pick has in the table, in the order above.
ADDRESSES = 6
#: What every address must be a multiple of, in bytes.
ALIGNMENT = 16


@triton.jit
def _bytes_at(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def _address(table, pick, which: tl.constexpr):
    return _bytes_at(tl.load(table + pick * 6 + which))


@triton.jit
def _packed_dot(packed, scale, even, odd, acc, C: tl.constexpr):
    """acc [ROWS, C] += fp4 tile `packed` [ROWS, BYTES] x its columns' tokens (both fp32 [BYTES])."""
    ROWS: tl.constexpr = packed.shape[0]
    BYTES: tl.constexpr = packed.shape[1]
    if PORTABLE:
        wide = tl.broadcast_to(power_of_two(scale)[:, :, None], (ROWS, BYTES // 16, 16))
        wide = tl.reshape(wide, (ROWS, BYTES))
        low = decode_e2m1(packed.to(tl.int32)) * wide
        high = decode_e2m1(packed.to(tl.int32) >> 4) * wide
        acc += tl.sum(low * even[None, :] + high * odd[None, :], axis=1)[:, None]
        return acc
    else:
        # bf16 of 2^(scale - 127 + 126 - 40): the 2^126 a code lacks, and 2^-40 to stay in range.
        lifted = ((tl.minimum(scale.to(tl.int32), 168) + 86) << 7).to(tl.int16)
        wide = tl.broadcast_to(lifted.to(tl.bfloat16, bitcast=True)[:, :, None], (ROWS, BYTES // 16, 16))
        low, high = decode_e2m1_pairs(packed, tl.reshape(wide, (ROWS, BYTES)))
        acc = tl.dot(low, tl.broadcast_to(even.to(tl.bfloat16)[:, None], (BYTES, C)), acc)
        return tl.dot(high, tl.broadcast_to(odd.to(tl.bfloat16)[:, None], (BYTES, C)), acc)


@triton.jit
def _unlift(acc):
    """[ROWS, C] accumulators to the [ROWS] results: every column holds the same."""
    if PORTABLE:
        return tl.max(acc, axis=1)
    else:
        return tl.max(acc, axis=1) * 1099511627776.0


@triton.jit
def _byte_order(BYTES: tl.constexpr):
    if PORTABLE:
        return tl.arange(0, BYTES)
    else:
        return pair_order(tl.arange(0, BYTES))


@triton.jit
def _token_pairs(x, at, end):
    """fp32 (even, odd) columns of the token at packed bytes `at`; zero past `end`."""
    even = tl.load(x + 2 * at, mask=at < end, other=0.0).to(tl.float32)
    odd = tl.load(x + 2 * at + 1, mask=at < end, other=0.0).to(tl.float32)
    return even, odd


@triton.jit
def _gate_up(
    x, table, weights, out, row_count, limit, picks_per_token,
    K: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()  # the addresses themselves come from the kernel before
    pick = tl.program_id(1)
    x += (pick // picks_per_token) * K
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (rows < row_count)[:, None]
    gate, gate_scale = _address(table, pick, 0), _address(table, pick, 1)
    up, up_scale = _address(table, pick, 2), _address(table, pick, 3)
    HALF: tl.constexpr = K // 2
    columns = tl.arange(0, BYTES)
    blocks = tl.arange(0, BYTES // 16)
    order = _byte_order(BYTES)
    g = tl.zeros((ROWS, C), tl.float32)
    u = tl.zeros((ROWS, C), tl.float32)
    even, odd = _token_pairs(x, order, HALF)
    for k in tl.range(0, HALF, BYTES, num_stages=STAGES):
        at = rows[:, None] * HALF + (k + columns)[None, :]
        at_scale = rows[:, None] * (K // 32) + (k // 16 + blocks)[None, :]
        mask = inside & (k + columns < HALF)[None, :]
        mask_scale = inside & (k // 16 + blocks < K // 32)[None, :]
        gate_codes = tl.load(gate + at, mask=mask, other=0)
        up_codes = tl.load(up + at, mask=mask, other=0)
        gate_scales = tl.load(gate_scale + at_scale, mask=mask_scale, other=0)
        up_scales = tl.load(up_scale + at_scale, mask=mask_scale, other=0)
        # Loaded one round ahead: these loads are too narrow for the asynchronous copies.
        next_even, next_odd = _token_pairs(x, k + BYTES + order, HALF)
        g = _packed_dot(gate_codes, gate_scales, even, odd, g, C)
        u = _packed_dot(up_codes, up_scales, even, odd, u, C)
        even, odd = next_even, next_odd
    a = to_bf16(tl.load(weights + pick) * swiglu(_unlift(g), _unlift(u), limit))
    rounded = tl.reshape(round_trip_e4m3(tl.reshape(a, (ROWS // 32, 32))), (ROWS,))
    tl.store(out + pick * row_count + rows, as_bf16(rounded), mask=rows < row_count)


@triton.jit
def _down(
    a, table, shared, out, row_count, streams, post, comb, pre, picks_per_token,
    K: tl.constexpr, C: tl.constexpr, PICKS: tl.constexpr, OUT: tl.constexpr, HC: tl.constexpr,
    ROWS: tl.constexpr, BYTES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    first = tl.program_id(1) * PICKS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < row_count
    HALF: tl.constexpr = K // 2
    ROUNDS: tl.constexpr = (HALF + BYTES - 1) // BYTES
    columns = tl.arange(0, BYTES)
    blocks = tl.arange(0, BYTES // 16)
    order = _byte_order(BYTES)
    acc = tl.zeros((ROWS, C), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    even, odd = _token_pairs(a + first * K, order, HALF)
    addresses = ()
    for i in tl.static_range(PICKS):
        addresses = addresses + (
            tl.load(table + (first + i) * 6 + 4),
            tl.load(table + (first + i) * 6 + 5),
        )
    # One loop over (pick, columns), so that copies keep flowing from one expert into the next.
    for step in tl.range(0, PICKS * ROUNDS, num_stages=STAGES):
        k = (step % ROUNDS) * BYTES
        # Chosen among registers: an address loaded here would hold back the copies that need it.
        address, scale_address = addresses[0], addresses[1]
        for i in tl.static_range(1, PICKS):
            here = step // ROUNDS == i
            address = tl.where(here, addresses[2 * i], address)
            scale_address = tl.where(here, addresses[2 * i + 1], scale_address)
        down, down_scale = _bytes_at(address), _bytes_at(scale_address)
        codes = tl.load(
            down + rows[:, None] * HALF + (k + columns)[None, :],
            mask=inside[:, None] & (k + columns < HALF)[None, :],
            other=0,
        )
        scales = tl.load(
            down_scale + rows[:, None] * (K // 32) + (k // 16 + blocks)[None, :],
            mask=inside[:, None] & (k // 16 + blocks < K // 32)[None, :],
            other=0,
        )
        following = tl.minimum(step + 1, PICKS * ROUNDS - 1)
        next_even, next_odd = _token_pairs(
            a + (first + following // ROUNDS) * K, (following % ROUNDS) * BYTES + order, HALF
        )
        acc = _packed_dot(codes, scales, even, odd, acc, C)
        even, odd = next_even, next_odd
        complete = step % ROUNDS == ROUNDS - 1
        y = to_bf16(_unlift(acc))
        total = tl.where(complete, total + y, total)
        acc = tl.where(complete, 0.0, acc)
    if OUT == PICKS_OUT:  # one pick a program, summed by the kernel that follows
        tl.store(out + first * row_count + rows, as_bf16(total), mask=inside)
    else:
        token = first // picks_per_token
        shared_at = shared + token * row_count + rows
        total += tl.load(shared_at, mask=inside, other=0.0).to(tl.float32)
        if OUT == STREAMS_OUT:
            y = to_bf16(total)
            mix_streams(y, rows, inside, streams, post, comb, pre, out, row_count, HC)
        else:
            tl.store(out + token * row_count + rows, as_bf16(total), mask=inside)


def experts_gate_up(
    x: torch.Tensor,
    table: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    limit: float,
    tile: Tile = Tile(32, 128, 2, 4),
) -> None:
    """Each pick's gate, up, clamped SwiGLU, routing weight and the rounding its down product takes.

    `x` bf16 [T, H] rounded; `table` int64 [T * k, 6] addresses; `weights` fp32 [T, k]; `out` bf16
    [T * k, I] = round trip of bf16(weight * silu(gate) * up). `tile.depth` counts packed bytes.
    """
    picks, rows = out.shape
    _gate_up[(triton.cdiv(rows, tile.rows), picks)](
        x, table, weights, out, rows, limit, picks // x.shape[0],
        K=x.shape[1], C=8, ROWS=tile.rows, BYTES=tile.depth, STAGES=tile.stages,
        num_warps=tile.warps, **PDL,
    )  # fmt: skip


def _launch_down(
    a: torch.Tensor, table: torch.Tensor, shared: torch.Tensor, out: torch.Tensor, mode: tl.constexpr,
    tokens: int, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, pre: torch.Tensor,
    tile: Tile,
) -> None:  # fmt: skip
    picks, columns = a.shape
    rows = out.shape[-1]
    each = 1 if mode == PICKS_OUT else picks // tokens
    _down[(triton.cdiv(rows, tile.rows), picks // each)](
        a, table, shared, out, rows, streams, post, comb, pre, picks // tokens,
        K=columns, C=8, PICKS=each, OUT=mode, HC=4,
        ROWS=tile.rows, BYTES=tile.depth, STAGES=tile.stages, num_warps=tile.warps, **PDL,
    )  # fmt: skip


def experts_down(
    a: torch.Tensor,
    table: torch.Tensor,
    shared: torch.Tensor,
    out: torch.Tensor,
    *,
    tile: Tile = Tile(32, 128, 2, 4),
) -> None:
    """`out` bf16 [T, H] = bf16(sum over picks of bf16(down a_pick), in the table's order, + shared).

    `a` bf16 [T * k, I] from `experts_gate_up`; `shared` bf16 [T, H], the shared expert's output.
    """
    _launch_down(a, table, shared, out, BF16_OUT, out.shape[0], out, out, out, out, tile)


def experts_down_each(
    a: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    *,
    tile: Tile = Tile(32, 128, 2, 4),
) -> None:
    """`out` bf16 [T, k, H]: every pick's bf16(down a_pick) by itself, for `post` to add in order."""
    _launch_down(a, table, out, out, PICKS_OUT, out.shape[0], out, out, out, out, tile)


def experts_down_to_streams(
    a: torch.Tensor,
    table: torch.Tensor,
    shared: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    collapsed: torch.Tensor,
    *,
    tile: Tile = Tile(32, 128, 2, 4),
) -> None:
    """`experts_down` of one token, put back into the streams at once as `fp8_matvec_to_streams` does."""
    _launch_down(a, table, shared, collapsed, STREAMS_OUT, 1, streams, post, comb, pre, tile)
