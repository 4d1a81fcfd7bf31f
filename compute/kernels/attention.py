"""Attention of one or a few queries over their window and their chosen compressed rows, in one
softmax.

Owns three kernels. The first two take 16 heads and one block of slots a program, so that a few
heads fill a GPU: one scores, one weighs the values. The third adds the blocks in fixed order,
brings in the sink and rotates the result back.

Probabilities are rounded to bf16 relative to the greatest score of all blocks up to their own, as
the model does. Scoring apart makes that known to blocks that run at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.norms import rotate_pairs
from compute.kernels.numeric import (
    PORTABLE,
    as_bf16,
    release_next,
    to_bf16,
    wait_for_previous,
)

#: Heads a program takes: the least rows of a tensor-core tile.
HEADS = 16
#: Rows a program takes.
ROWS = 64


@triton.jit
def _scores_dot(a, b):
    if PORTABLE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _slot_rows(
    block, token, window, window_index, window_slots, compressed, chosen, chosen_slots,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(pointers [ROWS] to the rows of a block's slots, which of them there are)."""
    slot = block * ROWS + tl.arange(0, ROWS)
    near = slot < window_slots
    row = tl.load(window_index + token * window_slots + slot, mask=near, other=-1)
    far = slot - window_slots
    there = (far >= 0) & (far < chosen_slots)
    picked = tl.load(chosen + token * chosen_slots + far, mask=there, other=-1)
    row = tl.where(near, row, picked).to(tl.int64)
    return tl.where(near, window + row * D, compressed + row * D), row >= 0


@triton.jit
def _attend_scores(
    q, cos, sin, window, window_index, window_slots, compressed, chosen, chosen_slots,
    scores, greatest, heads, blocks, scale,
    D: tl.constexpr, ROTATED: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    block, token = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_D)
    rows, seen = _slot_rows(
        block, token, window, window_index, window_slots, compressed, chosen, chosen_slots, D, ROWS
    )
    here = (head < heads)[:, None] & (column < D)[None, :]
    at = (token * heads + head)[:, None] * D + column[None, :]
    query = tl.load(q + at, mask=here, other=0.0).to(tl.float32)
    tail = here & (column >= D - ROTATED)[None, :]
    partner_at = (token * heads + head)[:, None] * D + (column ^ 1)[None, :]
    partner = tl.load(q + partner_at, mask=tail, other=0.0).to(tl.float32)
    angle = token * (ROTATED // 2)
    query = rotate_pairs(query, partner, column[None, :], D - ROTATED, D, cos + angle, sin + angle)
    kv = tl.load(
        rows[:, None] + column[None, :], mask=seen[:, None] & (column < D)[None, :], other=0.0
    )
    score = _scores_dot(as_bf16(query), tl.trans(kv)) * scale
    score = tl.where(seen[None, :], score, float("-inf"))
    place = (token * blocks + block) * heads + head
    slot = tl.arange(0, ROWS)
    tl.store(scores + place[:, None] * ROWS + slot[None, :], score, mask=(head < heads)[:, None])
    tl.store(greatest + place, tl.max(score, axis=1), mask=head < heads)


@triton.jit
def _attend_values(
    window, window_index, window_slots, compressed, chosen, chosen_slots,
    scores, greatest, out, origin, denominator, heads, blocks,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    block, token = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_D)
    rows, seen = _slot_rows(
        block, token, window, window_index, window_slots, compressed, chosen, chosen_slots, D, ROWS
    )
    kv = tl.load(
        rows[:, None] + column[None, :], mask=seen[:, None] & (column < D)[None, :], other=0.0
    )
    place = (token * blocks + block) * heads + head
    slot = tl.arange(0, ROWS)
    score = tl.load(
        scores + place[:, None] * ROWS + slot[None, :],
        mask=(head < heads)[:, None],
        other=float("-inf"),
    )
    earlier = tl.arange(0, BLOCKS)
    tops = tl.load(
        greatest + (token * blocks + earlier)[None, :] * heads + head[:, None],
        mask=(earlier <= block)[None, :] & (head < heads)[:, None],
        other=float("-inf"),
    )
    top = tl.max(tops, axis=1)
    probability = tl.exp(score - tl.where(top == float("-inf"), 0.0, top)[:, None])
    value = _scores_dot(as_bf16(probability), kv)
    tl.store(origin + place, top, mask=head < heads)
    tl.store(denominator + place, tl.sum(probability, axis=1), mask=head < heads)
    here = (head < heads)[:, None] & (column < D)[None, :]
    tl.store(out + place[:, None] * D + column[None, :], value, mask=here)


@triton.jit
def _combine(
    partials, origin, denominator, sink, cos, sin, out, heads, blocks,
    D: tl.constexpr, ROTATED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    head = tl.program_id(0)
    token = tl.program_id(1)
    block = tl.arange(0, BLOCKS)
    there = block < blocks
    place = (token * blocks + block) * heads + head
    top = tl.load(origin + place, mask=there, other=float("-inf"))
    sunk = tl.load(sink + head).to(tl.float32)
    most = tl.maximum(tl.max(top, axis=0), sunk)
    share = tl.exp(top - most)
    total = tl.sum(tl.load(denominator + place, mask=there, other=0.0) * share, axis=0)
    share = share / (total + tl.exp(sunk - most))
    column = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (column < D)[None, :]
    tail = mask & (column >= D - ROTATED)[None, :]
    at = place[:, None] * D
    y = tl.load(partials + at + column[None, :], mask=mask, other=0.0)
    partner = tl.load(partials + at + (column ^ 1)[None, :], mask=tail, other=0.0)
    y = to_bf16(tl.sum(y * share[:, None], axis=0))
    partner = to_bf16(tl.sum(partner * share[:, None], axis=0))
    angle = token * (ROTATED // 2)
    # The inverse rotation: the partner's part with its sign turned.
    y = rotate_pairs(y, -partner, column, D - ROTATED, D, cos + angle, sin + angle)
    tl.store(out + (token * heads + head) * D + column, as_bf16(y), mask=column < D)


def attention_blocks(slots: int) -> int:
    """How many blocks a query of so many slots has: the second axis of the scratch tensors."""
    blocks: int = triton.cdiv(slots, ROWS)
    return blocks


class AttentionScratch(NamedTuple):
    """What `attend` writes on the way, fp32, with B = `attention_blocks` of all slots: `partials`
    [T, B, heads, D], `scores` [T, B, heads, 64], `greatest`, `origin` and `denominator` [T, B,
    heads]."""

    partials: torch.Tensor
    scores: torch.Tensor
    greatest: torch.Tensor
    origin: torch.Tensor
    denominator: torch.Tensor

    @classmethod
    def empty(
        cls, tokens: int, slots: int, heads: int, width: int, device: torch.device
    ) -> AttentionScratch:
        shape = (tokens, attention_blocks(slots), heads)
        return cls(
            *(torch.empty(*shape, *more, device=device) for more in ((width,), (ROWS,), (), (), ()))
        )


def attend(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: torch.Tensor,
    window_index: torch.Tensor,
    compressed: torch.Tensor,
    chosen: torch.Tensor,
    sink: torch.Tensor,
    out: torch.Tensor,
    scratch: AttentionScratch,
) -> None:
    """Rotate queries, attend over two lists of rows with a sink, rotate the result back.

    `q` bf16 [T, heads, D] unrotated; `cos`, `sin` fp32 [T, rotated / 2]; rows `window_index` int32
    [T, W] of `window` bf16 [R, D] and behind them rows `chosen` int32 [T, n] of `compressed` bf16
    [M, D], -1 for none (n may be 0); `sink` fp32 [heads]; `out` bf16 [T, heads, D], zeros where a
    query sees no row. One token may take the scratch of more slots than it has.
    """
    tokens, heads, width = q.shape
    near, far = window_index.shape[1], chosen.shape[1]
    blocks = attention_blocks(near + far)
    padded = triton.next_power_of_2(width)
    rotated = 2 * cos.shape[1]
    rows = (window, window_index, near, compressed, chosen, far)
    grid = (blocks, triton.cdiv(heads, HEADS), tokens)
    several = triton.next_power_of_2(blocks)
    _attend_scores[grid](
        q, cos, sin, *rows, scratch.scores, scratch.greatest, heads, blocks, width**-0.5,
        D=width, ROTATED=rotated, BLOCK_D=padded, HEADS=HEADS, ROWS=ROWS, num_warps=4, **PDL,
    )  # fmt: skip
    _attend_values[grid](
        *rows, scratch.scores, scratch.greatest, scratch.partials, scratch.origin,
        scratch.denominator, heads, blocks, D=width, BLOCK_D=padded, HEADS=HEADS, ROWS=ROWS,
        BLOCKS=several, num_warps=4, **PDL,
    )  # fmt: skip
    _combine[(heads, tokens)](
        scratch.partials, scratch.origin, scratch.denominator, sink, cos, sin, out, heads, blocks,
        D=width, ROTATED=rotated, BLOCK_D=padded, BLOCKS=several, num_warps=4, **PDL,
    )  # fmt: skip
