"""Attention of one or a few queries over their window and their chosen compressed rows, in one
softmax.

Owns three kernels. One scores 16 heads and a block of slots a program, so that a few heads fill a
GPU. The next weighs a block's values, 16 heads and a slice of their columns a program. The last
adds the blocks, brings in the sink and rotates the result back.

Probabilities are rounded to bf16 relative to the greatest score of all blocks up to their own, as
the model does. Scoring apart makes that known without one block waiting for another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.norms import rotate_pairs
from compute.kernels.numeric import (
    as_bf16,
    bf16_dot,
    release_next,
    to_bf16,
    wait_for_previous,
)

#: Heads a program takes: the least rows of a tensor-core tile.
HEADS = 16
#: Rows a block has.
ROWS = 64
#: Columns of the values that a program weighs, of 16 heads.
COLUMNS = 64
#: Columns that a program adds up, of one head.
ADDED_COLUMNS = 256


@triton.jit
def _slot_rows(
    slot, token, window, window_index, window_slots, compressed, chosen, chosen_slots,
    D: tl.constexpr,
):  # fmt: skip
    """(pointers to the rows of `slot`, which of them there are)."""
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
    slot = tl.arange(0, ROWS)
    rows, seen = _slot_rows(
        block * ROWS + slot,
        token, window, window_index, window_slots, compressed, chosen, chosen_slots, D,
    )  # fmt: skip
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
    score = bf16_dot(as_bf16(query), tl.trans(kv)) * scale
    score = tl.where(seen[None, :], score, float("-inf"))
    place = (token * blocks + block) * heads + head
    tl.store(scores + place[:, None] * ROWS + slot[None, :], score, mask=(head < heads)[:, None])
    tl.store(greatest + place, tl.max(score, axis=1), mask=head < heads)


@triton.jit
def _attend_values(
    window, window_index, window_slots, compressed, chosen, chosen_slots,
    scores, greatest, weighed, totals, sink, heads, blocks,
    D: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    block, token = tl.program_id(0), tl.program_id(2)
    slices: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // slices * HEADS + tl.arange(0, HEADS)
    column = tl.program_id(1) % slices * COLUMNS + tl.arange(0, COLUMNS)
    there = head < heads
    slot = tl.arange(0, ROWS)
    rows, seen = _slot_rows(
        block * ROWS + slot,
        token, window, window_index, window_slots, compressed, chosen, chosen_slots, D,
    )  # fmt: skip
    values = tl.load(
        rows[:, None] + column[None, :], mask=seen[:, None] & (column < D)[None, :], other=0.0
    )
    place = (token * blocks + block) * heads + head
    score = tl.load(
        scores + place[:, None] * ROWS + slot[None, :], mask=there[:, None], other=float("-inf")
    )
    every = tl.arange(0, BLOCKS)
    tops = tl.load(
        greatest + (token * blocks + every)[:, None] * heads + head[None, :],
        mask=(every < blocks)[:, None] & there[None, :],
        other=float("-inf"),
    )
    most = tl.maximum(tl.max(tops, axis=0), tl.load(sink + head, mask=there, other=0.0))
    top = tl.max(tl.where((every <= block)[:, None], tops, float("-inf")), axis=0)
    # -inf as long as no slot of any block is there.
    probability = tl.exp(score - tl.where(top == float("-inf"), 0.0, top)[:, None])
    share = tl.exp(top - most)
    total = tl.sum(probability, axis=1) * share
    y = bf16_dot(as_bf16(probability), values) * share[:, None]
    at = place[:, None] * D + column[None, :]
    tl.store(weighed + at, y, mask=there[:, None] & (column < D)[None, :])
    if tl.program_id(1) % slices == 0:
        tl.store(totals + place, total, mask=there)


@triton.jit
def _add_blocks(
    greatest, weighed, totals, sink, cos, sin, out, heads, blocks,
    D: tl.constexpr, ROTATED: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    head, token = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    block = tl.arange(0, BLOCKS)
    here = block < blocks
    place = (token * blocks + block) * heads + head
    parts = tl.load(
        weighed + place[:, None] * D + column[None, :],
        mask=here[:, None] & inside[None, :],
        other=0.0,
    )
    sunk = tl.load(sink + head)
    tops = tl.load(greatest + place, mask=here, other=float("-inf"))
    total = tl.sum(tl.load(totals + place, mask=here, other=0.0), axis=0)
    total += tl.exp(sunk - tl.maximum(tl.max(tops, axis=0), sunk))
    y = to_bf16(tl.sum(parts, axis=0) / total)
    even, odd = tl.split(tl.reshape(y, (COLUMNS // 2, 2)))
    # The inverse rotation of the tail: the partner's part with its sign turned.
    pair = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2) - (D - ROTATED) // 2
    turned = (pair >= 0) & (pair < ROTATED // 2)
    angle = token * (ROTATED // 2) + pair
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    y = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (COLUMNS,))
    tl.store(out + (token * heads + head) * D + column, as_bf16(y), mask=inside)


def attention_blocks(slots: int) -> int:
    """How many blocks a query of so many slots has: the second axis of the scratch tensors."""
    blocks: int = triton.cdiv(slots, ROWS)
    return blocks


class AttentionScratch(NamedTuple):
    """What `attend` writes on the way, fp32, with B = `attention_blocks` of all slots: of every
    block and head `scores` [T, B, heads, 64], the `greatest` of them [T, B, heads], the values
    `weighed` by them [T, B, heads, D], and the weights' `totals` [T, B, heads]."""

    scores: torch.Tensor
    greatest: torch.Tensor
    weighed: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def empty(
        cls, tokens: int, slots: int, heads: int, width: int, device: torch.device
    ) -> AttentionScratch:
        shape = (tokens, attention_blocks(slots), heads)
        return cls(
            torch.empty(*shape, ROWS, device=device),
            torch.empty(shape, device=device),
            torch.empty(*shape, width, device=device),
            torch.empty(shape, device=device),
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
    groups = triton.cdiv(heads, HEADS)
    scores, greatest, weighed, totals = scratch
    _attend_scores[(blocks, groups, tokens)](
        q, cos, sin, *rows, scores, greatest, heads, blocks, width**-0.5,
        D=width, ROTATED=rotated, BLOCK_D=padded, HEADS=HEADS, ROWS=ROWS, num_warps=4, **PDL,
    )  # fmt: skip
    padded_blocks = triton.next_power_of_2(blocks)
    _attend_values[(blocks, groups * triton.cdiv(width, COLUMNS), tokens)](
        *rows, scores, greatest, weighed, totals, sink, heads, blocks,
        D=width, HEADS=HEADS, ROWS=ROWS, COLUMNS=COLUMNS, BLOCKS=padded_blocks,
        num_warps=4, num_stages=1, **PDL,
    )  # fmt: skip
    _add_blocks[(heads, triton.cdiv(width, ADDED_COLUMNS), tokens)](
        greatest, weighed, totals, sink, cos, sin, out, heads, blocks,
        D=width, ROTATED=rotated, COLUMNS=ADDED_COLUMNS, BLOCKS=padded_blocks, num_warps=2, **PDL,
    )  # fmt: skip
