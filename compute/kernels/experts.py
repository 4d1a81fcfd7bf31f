"""Routed experts straight from their packed fp4 bytes, wherever those lie.

Owns the kernels of the routed experts. Both take a table of addresses, six a pick (gate, gate
scale, up, up scale, down, down scale), each in device memory or in registered host memory: where an
expert lies never chooses the arithmetic.

At 4 bits a weight the arithmetic is the bottleneck, not the bytes, so it is done in integers: twice
an e2m1 value is a small integer, 512 times an e4m3 activation is one of 19 bits, held as three
signed bytes (`Limbs`), and byte dot products add 4 columns an instruction. The sum over a scale's
32 columns is exact; only the additions of such sums round, along K in the order of the loop, over
the picks in ascending expert id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.dense import Tile
from compute.kernels.launching import PDL
from compute.kernels.limbs import Limbs
from compute.kernels.numeric import (
    as_bf16,
    dot_eight,
    power_of_two,
    release_next,
    swiglu,
    swiglu_bound,
    wait_for_previous,
)

#: What every address must be a multiple of, in bytes.
ALIGNMENT = 16

GATE_UP_TILE = Tile(8, 128, 1)
DOWN_TILE = Tile(16, 32, 1)


@triton.jit
def _bytes_at(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def _words(address, rows, inside, word, WORDS_A_ROW: tl.constexpr):
    pointer = _bytes_at(address).to(tl.pointer_type(tl.int32))
    return tl.load(
        pointer + rows[:, None] * WORDS_A_ROW + word[None, :],
        mask=inside[:, None] & (word < WORDS_A_ROW)[None, :],
        other=0,
    )


@triton.jit
def _token_words(limbs, word, K: tl.constexpr):
    """int32 ([WORDS], [WORDS]): the limb's bytes for each word's first and last four columns."""
    words = limbs.to(tl.pointer_type(tl.int32)) + word
    first = tl.load(words, mask=word < K // 8, other=0)
    return first, tl.load(words + K // 8, mask=word < K // 8, other=0)


@triton.jit
def _token(limbs, limb_stride, sums, scales, first_word, K: tl.constexpr, WORDS: tl.constexpr):
    """What of one vector meets words first_word..+WORDS: its three limbs, group sums and scales."""
    word = first_word + tl.arange(0, WORDS)
    x0, x1 = _token_words(limbs, word, K)
    y0, y1 = _token_words(limbs + limb_stride, word, K)
    z0, z1 = _token_words(limbs + 2 * limb_stride, word, K)
    group = first_word // 4 + tl.arange(0, WORDS // 4)
    total = tl.load(sums + group, mask=group < K // 32, other=0)
    scale = tl.load(scales + group, mask=group < K // 32, other=0.0)
    return x0, x1, y0, y1, z0, z1, total * 16, scale * (1.0 / 1024.0)


@triton.jit
def _quarters(words, GROUPS: tl.constexpr):
    """The four words of every group of 32 columns, each [..., GROUPS], of [..., 4 * GROUPS]."""
    shape: tl.constexpr = (words.shape[0], GROUPS, 2, 2)
    even, odd = tl.split(tl.reshape(words, shape))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _shared_quarters(vector, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """`_quarters` of one vector's words [4 * GROUPS] that all rows meet, each [ROWS, GROUPS]."""
    return _quarters(tl.broadcast_to(vector[None, :], (ROWS, 4 * GROUPS)), GROUPS)


@triton.jit
def _scaled_sums(words, row_scale, token, zero, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """fp32 [ROWS, WORDS / 4]: the exact sums over 32 columns, times both scales."""
    groups: tl.constexpr = WORDS // 4
    low = tl.zeros((ROWS, groups), tl.int32)
    middle, high = low, low
    zero += low
    word = _quarters(words, groups)
    x0 = _shared_quarters(token[0], ROWS, groups)
    x1 = _shared_quarters(token[1], ROWS, groups)
    y0 = _shared_quarters(token[2], ROWS, groups)
    y1 = _shared_quarters(token[3], ROWS, groups)
    z0 = _shared_quarters(token[4], ROWS, groups)
    z1 = _shared_quarters(token[5], ROWS, groups)
    for i in tl.static_range(4):
        low, middle, high = dot_eight(
            word[i], x0[i], x1[i], y0[i], y1[i], z0[i], z1[i], low, middle, high, zero
        )
    sums = (high * 256 + middle) * 256 + low - token[6][None, :]
    return sums.to(tl.float32) * (power_of_two(row_scale) * token[7][None, :])


@triton.jit
def _row_scales(address, rows, inside, first_word, K: tl.constexpr, WORDS: tl.constexpr):
    group = first_word // 4 + tl.arange(0, WORDS // 4)
    return tl.load(
        _bytes_at(address) + rows[:, None] * (K // 32) + group[None, :],
        mask=inside[:, None] & (group < K // 32)[None, :],
        other=0,
    )


@triton.jit
def _gate_up(
    limbs, limb_stride, sums, scales, table, weights, out, row_count, limit, picks_per_token,
    K: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    wait_for_previous()  # the addresses themselves come from a kernel before
    pick = tl.program_id(1)
    token = pick // picks_per_token
    limbs += token * K
    sums += token * (K // 32)
    scales += token * (K // 32)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < row_count
    gate, gate_scale = tl.load(table + pick * 6), tl.load(table + pick * 6 + 1)
    up, up_scale = tl.load(table + pick * 6 + 2), tl.load(table + pick * 6 + 3)
    zero = (gate >> 62).to(tl.int32)  # no address is that high
    g = tl.zeros((ROWS, WORDS // 4), tl.float32)
    u = tl.zeros((ROWS, WORDS // 4), tl.float32)
    for word in range(0, K // 8, WORDS):
        at = word + tl.arange(0, WORDS)
        gate_words = _words(gate, rows, inside, at, K // 8)
        up_words = _words(up, rows, inside, at, K // 8)
        gate_row = _row_scales(gate_scale, rows, inside, word, K, WORDS)
        up_row = _row_scales(up_scale, rows, inside, word, K, WORDS)
        vector = _token(limbs, limb_stride, sums, scales, word, K, WORDS)
        g += _scaled_sums(gate_words, gate_row, vector, zero, ROWS, WORDS)
        u += _scaled_sums(up_words, up_row, vector, zero, ROWS, WORDS)
    release_next()
    a = tl.load(weights + pick) * swiglu(tl.sum(g, axis=1), tl.sum(u, axis=1), limit)
    tl.store(out + pick * row_count + rows, as_bf16(a), mask=inside)


@triton.jit
def _down(
    limbs, limb_stride, sums, scales, table, out, row_count,
    K: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    pick = tl.program_id(1)
    limbs += pick * K
    sums += pick * (K // 32)
    scales += pick * (K // 32)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < row_count
    down, down_scale = tl.load(table + pick * 6 + 4), tl.load(table + pick * 6 + 5)
    zero = (down >> 62).to(tl.int32)  # no address is that high
    acc = tl.zeros((ROWS, WORDS // 4), tl.float32)
    for word in range(0, K // 8, WORDS):
        words = _words(down, rows, inside, word + tl.arange(0, WORDS), K // 8)
        row_scale = _row_scales(down_scale, rows, inside, word, K, WORDS)
        vector = _token(limbs, limb_stride, sums, scales, word, K, WORDS)
        acc += _scaled_sums(words, row_scale, vector, zero, ROWS, WORDS)
    release_next()
    tl.store(out + pick * row_count + rows, as_bf16(tl.sum(acc, axis=1)), mask=inside)


def experts_gate_up(
    x: Limbs,
    table: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    limit: float,
    tile: Tile = GATE_UP_TILE,
) -> None:
    """Each pick's gate, up, clamped SwiGLU and routing weight.

    `x` of T vectors, `table` int64 [T * k, 6] addresses, `weights` fp32 [T, k]; `out` bf16 [T * k,
    I] = bf16(weight * silu(gate) * up), for `quantize`. `tile.depth` counts 32-bit words of a row.
    """
    tokens, (picks, rows) = x.sums.shape[0], out.shape
    _gate_up[(triton.cdiv(rows, tile.rows), picks)](
        x.bytes, x.bytes.stride(0), x.sums, x.scales, table, weights, out, rows,
        swiglu_bound(limit), picks // tokens,
        K=x.sums.shape[1] * 32, ROWS=tile.rows, WORDS=tile.depth, num_warps=tile.warps, **PDL,
    )  # fmt: skip


def experts_down(
    a: Limbs, table: torch.Tensor, out: torch.Tensor, *, tile: Tile = DOWN_TILE
) -> None:
    """`out` bf16 [T, k, H]: each pick's bf16(down a_pick), for `post` to add in the table's order.

    `a` of T * k vectors, `experts_gate_up`'s quantized. Every pick by itself because six times the
    programs keep six times the bytes on their way.
    """
    picks, columns, rows = a.sums.shape[0], a.sums.shape[1] * 32, out.shape[-1]
    _down[(triton.cdiv(rows, tile.rows), picks)](
        a.bytes, a.bytes.stride(0), a.sums, a.scales, table, out, rows,
        K=columns, ROWS=tile.rows, WORDS=tile.depth, num_warps=tile.warps, **PDL,
    )  # fmt: skip
