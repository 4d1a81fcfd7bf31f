"""Attention of many queries, each over its window and its chosen compressed rows, in one softmax.

Owns the kernel of a prefill's attention and the rotation around it. One program takes all heads of
a query (or 64 of them): a row of keys is also the row of values, so it is gathered once for both
products. It goes through the slots in blocks of 64 with a running maximum, which is the order of
roundings that the model has: probabilities are rounded to bf16 relative to the greatest score of
the blocks up to their own. No scores or keys are ever written to memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.numeric import UNFUSED, as_bf16, bf16_dot, exact_exp
from compute.rope import Rotation

#: Heads one program takes at most.
HEADS = 64
#: Slots a step of the softmax takes; part of the arithmetic (see the docstring above).
SLOTS = 64
#: Slots that are looked at together at least, to find the last filled one.
LOOKED_AT = 512


@triton.jit
def _last_filled(slots, count, BLOCK: tl.constexpr):
    """One past the last of `count` slots that is not empty; 0 where all are."""
    slot = tl.arange(0, BLOCK)
    value = tl.load(slots + slot, mask=slot < count, other=-1)
    return tl.max(tl.where(value >= 0, slot + 1, 0), axis=0)


@triton.jit(do_not_specialize=("near", "far"))
def _attend_chunk(
    queries, window, near_slots, near, rows, far_slots, far, sink, out, heads, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_D)
    here = (head < heads)[:, None] & (column < D)[None, :]
    at = (token * heads + head)[:, None] * D + column[None, :]
    query = tl.load(queries + at, mask=here, other=0.0)
    near_slots += token * near
    far_slots += token * far
    filled = _last_filled(near_slots, near, NEAR)
    if FAR > 0:
        chosen = _last_filled(far_slots, far, FAR)
        filled = tl.where(chosen > 0, near + chosen, filled)
    highest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    summed = tl.zeros((HEADS, BLOCK_D), tl.float32)
    for first in range(0, filled, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        row = tl.load(near_slots + slot, mask=slot < near, other=-1)
        start = window
        if FAR > 0:
            picked = tl.load(
                far_slots + slot - near, mask=(slot >= near) & (slot < near + far), other=-1
            )
            row = tl.where(slot < near, row, picked)
            start = tl.where(slot < near, window, rows)
        seen = row >= 0
        # An empty slot reads row 0, which its share of 0 makes no part of the sum.
        at_row = (start + tl.maximum(row, 0).to(tl.int64) * D)[:, None]
        if D == BLOCK_D:
            keys = tl.load(at_row + column[None, :])
        else:
            keys = tl.load(at_row + column[None, :], mask=(column < D)[None, :], other=0.0)
        score = tl.where(seen[None, :], bf16_dot(query, tl.trans(keys)) * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen: exp(-inf) is 0
        rescale = exact_exp(highest - origin)
        share = exact_exp(score - origin[:, None])
        total = total * rescale + tl.sum(share, axis=1)
        summed = summed * rescale[:, None] + bf16_dot(as_bf16(share), keys)
        highest = higher
    sunk = tl.load(sink + head, mask=head < heads, other=0.0).to(tl.float32)
    total += exact_exp(sunk - highest)  # infinite where nothing was seen: 0 / inf is 0
    attended = tl.div_rn(summed, tl.broadcast_to(total[:, None], summed.shape))
    tl.store(out + at, as_bf16(attended), mask=here)


@triton.jit
def _rotate_tail(
    x, cos, sin, heads, sign,
    D: tl.constexpr, ROTATED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, ROTATED // 2)
    c = tl.load(cos + token * (ROTATED // 2) + pair)[None, :]
    s = tl.load(sin + token * (ROTATED // 2) + pair)[None, :] * sign
    column = tl.arange(0, ROTATED)
    at = x + ((token * heads + head) * D + D - ROTATED)[:, None] + column[None, :]
    mask = (head < heads)[:, None] & (column >= 0)[None, :]
    pairs = tl.reshape(tl.load(at, mask=mask, other=0.0), (HEADS, ROTATED // 2, 2))
    a, b = tl.split(pairs.to(tl.float32))
    turned = tl.join(a * c - b * s, a * s + b * c)
    tl.store(at, as_bf16(tl.reshape(turned, (HEADS, ROTATED))), mask=mask)


def rotate_tail(x: torch.Tensor, by: Rotation, *, inverse: bool = False) -> torch.Tensor:
    """bf16 `x` [T, heads, D] with the last 2 * len(cos) columns rotated, pair by adjacent pair.

    `x` itself, written over.
    """
    tokens, heads, width = x.shape
    block = min(HEADS, triton.next_power_of_2(heads))
    _rotate_tail[(tokens, triton.cdiv(heads, block))](
        x, by.cos, by.sin, heads, -1.0 if inverse else 1.0,
        D=width, ROTATED=2 * by.cos.shape[1], HEADS=block, num_warps=4, **UNFUSED,
    )  # fmt: skip
    return x


def sparse_attention(
    queries: torch.Tensor,
    sink: torch.Tensor,
    window: torch.Tensor,
    window_slots: torch.Tensor,
    rows: torch.Tensor | None = None,
    row_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """bf16 [T, heads, d]; as `compute.layers.attention.sparse_attention`, slots of any integers.

    `queries` bf16 [T, heads, d], `sink` fp32 [heads]; `window` bf16 [m, d] read at `window_slots`
    [T, S] and, after those in the softmax, `rows` bf16 [n, d] at `row_slots` [T, R]; -1 is empty.
    """
    tokens, heads, width = queries.shape
    out = torch.empty_like(queries)
    near = window_slots.shape[1]
    if rows is None or row_slots is None or row_slots.shape[1] == 0:
        rows, row_slots, far = window, window_slots, 0
    else:
        far = row_slots.shape[1]
    block = max(16, min(HEADS, triton.next_power_of_2(heads)))
    _attend_chunk[(tokens, triton.cdiv(heads, block))](
        queries, window, window_slots, near, rows, row_slots, far, sink, out, heads, width**-0.5,
        D=width, BLOCK_D=triton.next_power_of_2(max(width, 16)), HEADS=block, SLOTS=SLOTS,
        NEAR=_looked_at(near), FAR=_looked_at(far) if far else 0,
        num_warps=8 if block == HEADS else 4, num_stages=2, **UNFUSED,
    )  # fmt: skip
    return out


def _looked_at(slots: int) -> int:
    """How many are looked at for the last filled one; few sizes, since each is compiled."""
    fitting: int = triton.next_power_of_2(slots)
    return max(LOOKED_AT, fitting)
