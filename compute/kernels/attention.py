"""Attention of one or a few queries over their window and their chosen compressed rows, in one
softmax.

Owns two kernels. The first takes 16 heads and one block of rows a program, so that a few heads fill
a GPU; the second adds the blocks in fixed order, brings in the sink and rotates the result back.

The reference rounds probabilities to bf16 relative to the greatest score of all blocks so far; here
it is the greatest of the block itself, because blocks run at the same time. That changes which way
a probability rounds, not how far: 2 to 5 % of outputs by one bf16 step, rel 4e-4 to 1e-3
(`docs/kernels.md`), and nothing where there is a single block.
"""

from __future__ import annotations

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
def _attend_block(
    q, cos, sin, window, window_index, window_slots, compressed, chosen, chosen_slots,
    out, greatest, denominator, heads, blocks, window_blocks, scale,
    D: tl.constexpr, ROTATED: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    token = tl.program_id(2)
    block = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_D)
    slot = tl.arange(0, ROWS)
    if block < window_blocks:
        slot += block * ROWS
        row = tl.load(
            window_index + token * window_slots + slot, mask=slot < window_slots, other=-1
        )
        source = window
    else:
        slot += (block - window_blocks) * ROWS
        row = tl.load(chosen + token * chosen_slots + slot, mask=slot < chosen_slots, other=-1)
        source = compressed
    seen = row >= 0
    here = (head < heads)[:, None] & (column < D)[None, :]
    at = (token * heads + head)[:, None] * D + column[None, :]
    query = tl.load(q + at, mask=here, other=0.0).to(tl.float32)
    tail = here & (column >= D - ROTATED)[None, :]
    partner_at = (token * heads + head)[:, None] * D + (column ^ 1)[None, :]
    partner = tl.load(q + partner_at, mask=tail, other=0.0).to(tl.float32)
    angle = token * (ROTATED // 2)
    query = rotate_pairs(query, partner, column[None, :], D - ROTATED, D, cos + angle, sin + angle)
    kv = tl.load(
        source + row.to(tl.int64)[:, None] * D + column[None, :],
        mask=seen[:, None] & (column < D)[None, :],
        other=0.0,
    )
    score = _scores_dot(as_bf16(query), tl.trans(kv)) * scale
    score = tl.where(seen[None, :], score, float("-inf"))
    top = tl.max(score, axis=1)
    probability = tl.where(
        seen[None, :], tl.exp(score - tl.where(top == float("-inf"), 0.0, top)[:, None]), 0.0
    )
    total = tl.sum(probability, axis=1)
    value = _scores_dot(as_bf16(probability), kv)
    place = (token * blocks + block) * heads + head
    tl.store(greatest + place, top, mask=head < heads)
    tl.store(denominator + place, total, mask=head < heads)
    tl.store(out + place[:, None] * D + column[None, :], value, mask=here)


@triton.jit
def _combine(
    partials, greatest, denominator, sink, cos, sin, out, heads, blocks,
    D: tl.constexpr, ROTATED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    head = tl.program_id(0)
    token = tl.program_id(1)
    block = tl.arange(0, BLOCKS)
    there = block < blocks
    place = (token * blocks + block) * heads + head
    top = tl.load(greatest + place, mask=there, other=float("-inf"))
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


def attention_blocks(window_slots: int, chosen_slots: int) -> int:
    """How many blocks of rows a query of these widths has: the second axis of the scratch
    tensors.
    """
    blocks: int = triton.cdiv(window_slots, ROWS) + triton.cdiv(chosen_slots, ROWS)
    return blocks


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
    partials: torch.Tensor,
    greatest: torch.Tensor,
    denominator: torch.Tensor,
) -> None:
    """Rotate queries, attend over two lists of rows with a sink, rotate the result back.

    `q` bf16 [T, heads, D] unrotated; `cos`, `sin` fp32 [T, rotated / 2]; rows `window_index` int32
    [T, W] of `window` bf16 [R, D] and rows `chosen` int32 [T, n] of `compressed` bf16 [M, D], -1
    for none (n may be 0); `sink` fp32 [heads]; `out` bf16 [T, heads, D], zeros where a query sees
    no row. Scratch, fp32, with B = `attention_blocks(W, n)`: `partials` [T, B, heads, D],
    `greatest` and `denominator` [T, B, heads].
    """
    tokens, heads, width = q.shape
    blocks = attention_blocks(window_index.shape[1], chosen.shape[1])
    padded = triton.next_power_of_2(width)
    rotated = 2 * cos.shape[1]
    _attend_block[(blocks, triton.cdiv(heads, HEADS), tokens)](
        q, cos, sin, window, window_index, window_index.shape[1], compressed, chosen,
        chosen.shape[1], partials, greatest, denominator, heads, blocks,
        triton.cdiv(window_index.shape[1], ROWS), width**-0.5, D=width, ROTATED=rotated,
        BLOCK_D=padded, HEADS=HEADS, ROWS=ROWS, num_warps=4, **PDL,
    )  # fmt: skip
    _combine[(heads, tokens)](
        partials, greatest, denominator, sink, cos, sin, out, heads, blocks,
        D=width, ROTATED=rotated, BLOCK_D=padded, BLOCKS=triton.next_power_of_2(blocks),
        num_warps=4, **PDL,
    )  # fmt: skip
