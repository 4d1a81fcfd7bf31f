"""Routed experts of many tokens straight from their packed fp4 bytes, all that are there in one
launch.

Owns the kernels and the order in which they hold things. A program multiplies some rows of one
expert with some of the picks it got. Weights go from their bytes to the tensor cores through
registers only: a thread decodes the eight codes of a word to bf16, whose products with activations
on the fp8 grid are exact, and holds them where the instruction wants its first operand. For that a
tile's rows are dealt out to the warps (`_dealt`), and activations hold the columns of every 128 in
the order in which words give them (`interleaved`).

A tile's accumulators are summed along K in the order of the loop, whatever its size; which tile
takes a pick depends on the counts of picks alone, so where an expert lies never shows in a bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from compute.kernels.numeric import (
    PORTABLE,
    as_bf16,
    power_of_two,
    round_trip_e4m3,
    swiglu,
    swiglu_bound,
    to_bf16,
)

#: Columns of a weight that one round of the loop takes: 16 words of a row, and four scales.
DEPTH = 128
_WORDS = tl.constexpr(16)


class Tile(NamedTuple):
    """`rows` of weights (gate and up together) by `picks`, and how the program is scheduled."""

    rows: int
    picks: int
    stages: int
    warps: int


def _decode_assembly() -> str:
    """Eight registers of two bf16 from two words: register i has code i of each, times its scale.

    A code's three low bits become the last exponent bits and the first mantissa bit of a bf16,
    which is then 2^126 too small. The scale makes up for that; in two factors, since neither 2^126
    nor its product with a large scale is a bf16.
    """
    lines = [".reg .b32 low, high, size, sign, first, second;"]
    lines += ["prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
    lines += ["prmt.b32 first, $10, $11, 0x5410;", "prmt.b32 second, $12, $13, 0x5410;"]
    for code in range(8):
        half, place = "low" if code < 4 else "high", 4 * (code % 4)
        shift = f"shl.b32 size, {half}, {6 - place}" if place < 6 else None
        lines += [
            f"{shift or f'shr.b32 size, {half}, {place - 6}'};",
            "and.b32 size, size, 0x01C001C0;",
            f"shl.b32 sign, {half}, {12 - place};",
            "lop3.b32 size, sign, 0x80008000, size, 0xEA;",
            "mul.bf16x2 size, size, first;",
            f"mul.bf16x2 ${code}, size, second;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_DECODE = tl.constexpr(_decode_assembly())


@triton.jit
def _value(words, scale, code: tl.constexpr):
    bits = (words >> (4 * code)) & 15
    size = bits & 7
    twice = tl.where(size < 2, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0))
    return tl.where(bits > 7, -twice, twice).to(tl.float32) * (0.5 * scale)


@triton.jit
def _decoded(words, scale_bytes):
    """The eight codes of each of int32 `words` times the scale of uint8-valued `scale_bytes`."""
    if PORTABLE:
        scale = power_of_two(scale_bytes)
        return (
            _value(words, scale, 0),
            _value(words, scale, 1),
            _value(words, scale, 2),
            _value(words, scale, 3),
            _value(words, scale, 4),
            _value(words, scale, 5),
            _value(words, scale, 6),
            _value(words, scale, 7),
        )
    else:
        exponent = scale_bytes - 1  # 2^126 of it is the codes'
        first = exponent >> 1
        return tl.inline_asm_elementwise(
            asm=_DECODE,
            constraints="=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r",
            args=[
                words,
                (first + 127) << 7,
                (exponent - first + 127) << 7,
            ],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _dealt(weights, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """[ROWS, 128] of eight [ROWS, 16]: every element stays in the thread that decoded it.

    The instruction wants of 16 rows the r-th and the r + 8-th in one thread; those are rows of two
    halves of the tile here, so that a half is loaded, and stored, as a whole.
    """
    a, b, c, d, e, f, g, h = weights
    first = tl.join(tl.join(a, b), tl.join(c, d))
    codes = tl.join(first, tl.join(tl.join(e, f), tl.join(g, h)))
    parts = tl.reshape(codes, (ROWS // (16 * WARPS), 2, WARPS, 8, 4, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 2, 1, 3, 9, 8, 7, 5, 4, 6)), (ROWS, 128))


@triton.jit
def _settled(acc):
    """`acc`, once the tensor cores are done with it.

    A product whose sums only the next round takes is left running, and Triton 3.6 then lets that
    round's decoding overwrite registers with weights that are still to be read (its issue 9433).
    Whoever looks at the sums, as this does and nothing else, makes it wait.
    """
    return tl.inline_asm_elementwise(
        asm="mov.b32 $0, $1;",
        constraints="=r,r",
        args=[acc],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _sums(
    words, scales, inside, vectors, pick,
    K: tl.constexpr, ROWS: tl.constexpr, PICKS: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS / 16 / WARPS, WARPS, 2, 8, PICKS]: rows of an fp4 weight times picks' vectors.

    `words` int32 pointers and `scales` uint8 pointers [ROWS] to the rows' first, `inside` says
    which rows there are; `vectors` a descriptor of interleaved vectors, from `pick` on. Those past
    an expert's picks are multiplied too, and nobody looks at the sums.
    """
    word = tl.arange(0, _WORDS)
    acc = tl.zeros((ROWS, PICKS), tl.float32)
    for k in tl.range(0, (K + 127) // 128, num_stages=STAGES):
        if K % 128 == 0:
            held = tl.load(words[:, None] + k * 16 + word[None, :], mask=inside[:, None], other=0)
            four = tl.load(scales.to(tl.pointer_type(tl.int32)) + k, mask=inside, other=0)
            scale = (four[:, None] >> (8 * (word // 4))[None, :]) & 255
        else:
            there = inside[:, None] & (k * 16 + word < K // 8)[None, :]
            held = tl.load(words[:, None] + k * 16 + word[None, :], mask=there, other=0)
            scale = tl.load(scales[:, None] + k * 4 + (word // 4)[None, :], mask=there, other=0)
            scale = scale.to(tl.int32)
        columns = vectors.load([pick, k * 128]).T
        weights = _dealt(_decoded(held, scale), ROWS, WARPS)
        if PORTABLE:
            acc += tl.dot(weights, columns.to(tl.float32), input_precision="ieee")
        else:
            acc = _settled(tl.dot(weights, columns, acc))
    return tl.reshape(acc, (ROWS // (16 * WARPS), WARPS, 2, 8, PICKS))


@triton.jit
def _at(address, kind):
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit
def _gate_up(
    vectors, work, weights, inner, row_count, limit,
    K: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, PICKS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    work += tl.program_id(1) * 8
    begin, end = tl.load(work + 6).to(tl.int32), tl.load(work + 7).to(tl.int32)
    # A row of the gate and the same one of the up product meet in one thread.
    first = tl.program_id(0) * (ROWS // 2)
    row = tl.arange(0, ROWS)
    is_up = row // (8 * WARPS) % 2 == 1
    row = first + row // (16 * WARPS) * (8 * WARPS) + row % (8 * WARPS)
    gate, up = tl.load(work), tl.load(work + 2)
    gate_scale, up_scale = tl.load(work + 1), tl.load(work + 3)
    apart = tl.multiple_of((up - gate) // 4, 4)
    scales_apart = tl.multiple_of(up_scale - gate_scale, 16)
    words = _at(gate, tl.int32) + tl.where(is_up, apart, 0) + row * (K // 8)
    scales = _at(gate_scale, tl.uint8) + tl.where(is_up, scales_apart, 0) + row * (K // 32)
    acc = _sums(words, scales, row < row_count, vectors, begin, K, ROWS, PICKS, STAGES, WARPS)

    g, u = tl.split(tl.permute(acc, (0, 1, 3, 4, 2)))
    pick = begin + tl.arange(0, PICKS)
    taken = pick < end
    weight = tl.load(weights + pick, mask=taken, other=0.0)
    g = tl.reshape(g, (ROWS // 2, PICKS))
    a = to_bf16(weight[None, :] * swiglu(g, tl.reshape(u, (ROWS // 2, PICKS)), limit))
    groups = tl.reshape(tl.trans(a), (PICKS * ROWS // 64, 32))
    rounded = tl.reshape(round_trip_e4m3(groups), (PICKS, ROWS // 2))
    column = first + tl.arange(0, ROWS // 2)
    word, code = column % 128 // 8, column % 8
    position = code * 16 + word // 2 % 2 * 8 + word // 4 * 2 + word % 2
    at = pick.to(tl.int64)[:, None] * INNER + (column // 128 * 128 + position)[None, :]
    there = taken[:, None] & (column < row_count)[None, :]
    tl.store(inner + at, as_bf16(rounded), mask=there)


@triton.jit
def _down(
    vectors, work, order, out, row_count,
    K: tl.constexpr,
    ROWS: tl.constexpr, PICKS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    work += tl.program_id(1) * 8
    begin, end = tl.load(work + 6).to(tl.int32), tl.load(work + 7).to(tl.int32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = _at(tl.load(work + 4), tl.int32) + row * (K // 8)
    scales = _at(tl.load(work + 5), tl.uint8) + row * (K // 32)
    acc = _sums(words, scales, row < row_count, vectors, begin, K, ROWS, PICKS, STAGES, WARPS)
    y = tl.reshape(tl.permute(acc, (0, 2, 1, 3, 4)), (ROWS, PICKS))
    pick = begin + tl.arange(0, PICKS)
    taken = pick < end
    place = tl.load(order + pick, mask=taken, other=0)
    at = place.to(tl.int64)[None, :] * row_count + row[:, None]
    tl.store(out + at, as_bf16(y), mask=taken[None, :] & (row < row_count)[:, None])


@triton.jit
def _sum_picks(outputs, total, width, PICKS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token, mask = tl.program_id(0).to(tl.int64), column < width
    outputs += token * PICKS * width + column
    acc = tl.load(outputs, mask=mask, other=0.0).to(tl.float32)
    for place in tl.static_range(1, PICKS):
        acc += tl.load(outputs + place * width, mask=mask, other=0.0).to(tl.float32)
    tl.store(total + token * width + column, acc, mask=mask)


def interleaved(x: torch.Tensor) -> torch.Tensor:
    """bf16 [T, ceil(K / 128) * 128] of `x` [T, K]: of every 128 columns, which are 16 words of
    eight, the first column of each word, then the second ... A word's place among the 16 has its
    two low bits turned as the tensor cores' operand has them. What is missing of 128 is 0."""
    padded = F.pad(x, (0, -x.shape[1] % DEPTH))
    parts = padded.view(len(x), -1, 4, 2, 2, 8)
    return parts.permute(0, 1, 5, 3, 2, 4).reshape(len(x), -1)


def gate_up(
    vectors: torch.Tensor,
    work: torch.Tensor,
    weights: torch.Tensor,
    inner: torch.Tensor,
    *,
    intermediate: int,
    hidden: int,
    limit: float,
    tile: Tile,
) -> None:
    """Gate, up, clamped SwiGLU, routing weight and the rounding to the fp8 grid of `work`'s picks.

    `vectors` bf16 [picks, ...] are `interleaved` from `hidden` columns on the fp8 grid, and
    `weights` fp32 [picks]. `work` int64 [n, 8]: an expert's six addresses as the decode kernels
    have them, and of at most `tile.picks` picks the first and the one after the last. Those rows of
    `inner` bf16 [picks, ...] are written, interleaved, `intermediate` columns of them.
    """
    grid = (triton.cdiv(2 * intermediate, tile.rows), len(work))
    _gate_up[grid](
        _described(vectors, tile), work, weights, inner, intermediate,
        swiglu_bound(limit), K=hidden, INNER=inner.shape[1],
        ROWS=tile.rows, PICKS=tile.picks, STAGES=tile.stages, WARPS=tile.warps,
        num_warps=tile.warps,
    )  # fmt: skip


def down(
    inner: torch.Tensor,
    work: torch.Tensor,
    order: torch.Tensor,
    out: torch.Tensor,
    *,
    intermediate: int,
    tile: Tile,
) -> None:
    """bf16(down a) of `work`'s picks, `gate_up`'s `inner`: row `order`[pick] (int32) of `out`
    bf16 [picks, D]."""
    _down[(triton.cdiv(out.shape[1], tile.rows), len(work))](
        _described(inner, tile), work, order, out, out.shape[1], K=intermediate,
        ROWS=tile.rows, PICKS=tile.picks, STAGES=tile.stages, WARPS=tile.warps,
        num_warps=tile.warps,
    )  # fmt: skip


def _described(vectors: torch.Tensor, tile: Tile) -> TensorDescriptor:
    """What the copy engine needs to know: it gives 0 for rows that there are not."""
    return TensorDescriptor.from_tensor(vectors, [tile.picks, DEPTH])


def sum_picks(outputs: torch.Tensor, total: torch.Tensor) -> None:
    """fp32 `total` [T, D] = the outputs bf16 [T * k, D] of a token's k places, added in order."""
    tokens, width = total.shape
    _sum_picks[(tokens, triton.cdiv(width, 1024))](
        outputs, total, width, PICKS=len(outputs) // tokens, BLOCK=1024
    )
