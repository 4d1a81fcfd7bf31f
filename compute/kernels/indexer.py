"""The indexer on the device: queries, scores, the rows a query reads, and the candidate blocks.

Owns scoring and the exact top-k. A score is bf16, so its order fits 16 bits: one program finds the
k-th greatest with two histograms of 8 bits and then collects what lies above it, in position order;
of equal scores at the cut the oldest win. Loops end at the rows a query sees, read on the device,
so the cost follows the context and one captured graph serves all of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.norms import rotate_pairs
from compute.kernels.numeric import (
    as_bf16,
    bf16_dot,
    release_next,
    round_trip_e2m1_index,
    to_bf16,
    wait_for_previous,
)

#: Keys one program scores.
KEYS = 64
#: Items one program looks at together when it chooses. Few sizes, since each is compiled.
BLOCKS = (64, 256, 1024, 4096)
#: The ordered form of -inf, below that of every score; 0 stands for what is no score at all.
_LEAST = tl.constexpr(0x007F)


@triton.jit
def _index_queries(
    q, raw, cos, sin, queries, weights, heads, scale,
    D: tl.constexpr, ROTATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    head, token = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < D
    at = (token * heads + head) * D
    x = tl.load(q + at + column, mask=mask, other=0.0).to(tl.float32)
    tail = mask & (column >= D - ROTATED)
    p = tl.load(q + at + (column ^ 1), mask=tail, other=0.0).to(tl.float32)
    angle = token * (ROTATED // 2)
    y = to_bf16(rotate_pairs(x, p, column, D - ROTATED, D, cos + angle, sin + angle))
    z = tl.reshape(round_trip_e2m1_index(tl.reshape(y, (BLOCK // 32, 32))), (BLOCK,))
    tl.store(queries + at + column, as_bf16(z), mask=mask)
    w = tl.load(raw + token * heads + head).to(tl.float32) * scale
    tl.store(weights + token * heads + head, as_bf16(w))


@triton.jit(do_not_specialize=("blocks", "capacity"))
def _index_scores(
    queries, weights, keys, visible, allowed, blocks, scores, capacity, heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    CANDIDATE: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    token = tl.program_id(1)
    seen = tl.load(visible + token)
    first = tl.program_id(0) * KEYS
    if first < seen:
        row = first + tl.arange(0, KEYS)
        head = tl.arange(0, HEADS)
        column = tl.arange(0, BLOCK_D)
        q = tl.load(
            queries + (token * heads + head)[:, None] * D + column[None, :],
            mask=(head < heads)[:, None] & (column < D)[None, :],
            other=0.0,
        )
        k = tl.load(
            keys + row[:, None].to(tl.int64) * D + column[None, :],
            mask=(row < seen)[:, None] & (column < D)[None, :],
            other=0.0,
        )
        w = tl.load(weights + token * heads + head, mask=head < heads, other=0.0).to(tl.float32)
        dots = bf16_dot(k, tl.trans(q))
        part = to_bf16(tl.maximum(to_bf16(dots), 0.0) * w[None, :])
        score = tl.sum(part, axis=1)
        reach = row < seen
        if CANDIDATE > 0:
            block = tl.load(allowed + token * blocks + row // CANDIDATE, mask=reach, other=0)
            reach = reach & (block != 0)
        score = tl.where(reach, score, float("-inf"))
        tl.store(scores + token.to(tl.int64) * capacity + row, as_bf16(score), mask=row < capacity)


@triton.jit
def _ordered(scores, item, count, seen, newest, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """int32 [BLOCK] in 0..65535 that sorts as the scores do; a group counts as its best row."""
    member = tl.arange(0, GROUP)
    row = item[:, None] * GROUP + member[None, :]
    value = tl.load(scores + row, mask=(row < seen), other=float("-inf")).to(tl.float32)
    best = tl.max(value, axis=1) + 0.0  # + 0.0 makes -0 equal to 0
    if GROUP > 1:
        best = tl.where(item == newest, float("inf"), best)
    bits = (best.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    order = tl.where(bits >= 0x8000, bits ^ 0xFFFF, bits ^ 0x8000)
    return tl.where(item < count, order, 0)


@triton.jit
def _cut(histogram, wanted):
    """(digit, how many lie above it): the greatest digit with at least `wanted` at it or above, or
    0.
    """
    digit = tl.arange(0, 256)
    above = tl.cumsum(histogram, axis=0, reverse=True)
    chosen = tl.max(tl.where(above >= wanted, digit, 0), axis=0)
    return chosen, tl.sum(tl.where(digit > chosen, histogram, 0), axis=0)


@triton.jit(do_not_specialize=("capacity", "width", "wanted"))
def _choose(
    scores, visible, out, capacity, width, wanted,
    GROUP: tl.constexpr, LIST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    token = tl.program_id(0)
    scores += token.to(tl.int64) * capacity
    out += token.to(tl.int64) * width
    seen = tl.load(visible + token)
    count = (seen + GROUP - 1) // GROUP
    newest = (seen - 1) // GROUP
    lane = tl.arange(0, BLOCK)
    high = tl.zeros((256,), tl.int32)
    for first in range(0, count, BLOCK):
        order = _ordered(scores, first + lane, count, seen, newest, GROUP, BLOCK)
        high += tl.histogram(order >> 8, 256, mask=order > _LEAST)
    top, above = _cut(high, wanted)
    low = tl.zeros((256,), tl.int32)
    for first in range(0, count, BLOCK):
        order = _ordered(scores, first + lane, count, seen, newest, GROUP, BLOCK)
        low += tl.histogram(order & 255, 256, mask=(order > _LEAST) & (order >> 8 == top))
    bottom, between = _cut(low, wanted - above)
    threshold = tl.maximum(top * 256 + bottom, _LEAST + 1)
    ties = wanted - above - between  # how many scored exactly at the cut may come along
    taken, tied = 0, 0
    if LIST:
        for first in range(0, width, BLOCK):
            tl.store(out + first + lane, tl.full((BLOCK,), -1, tl.int32), mask=first + lane < width)
        tl.debug_barrier()  # the rows below must not be overwritten by these
    for first in range(0, count, BLOCK):
        item = first + lane
        order = _ordered(scores, item, count, seen, newest, GROUP, BLOCK)
        equal = (order == threshold).to(tl.int32)
        rank = tied + tl.cumsum(equal, axis=0)
        keep = (order > threshold) | ((equal != 0) & (rank <= ties))
        if LIST:
            place = taken + tl.cumsum(keep.to(tl.int32), axis=0) - 1
            tl.store(out + place, item, mask=keep)
            taken += tl.sum(keep.to(tl.int32), axis=0)
        else:
            tl.store(out + item, keep.to(tl.uint8), mask=item < width)
        tied += tl.sum(equal, axis=0)


def index_queries(
    q: torch.Tensor,
    raw: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Rotate index queries and put them on the fp4 grid; scale the heads' weights.

    `q`, `queries` bf16 [T, heads, d]; `raw`, `weights` bf16 [T, heads], times (d * heads)^-0.5.
    """
    tokens, heads, width = q.shape
    _index_queries[(heads, tokens)](
        q, raw, cos, sin, queries, weights, heads, width**-0.5 * heads**-0.5,
        D=width, ROTATED=2 * cos.shape[1], BLOCK=triton.next_power_of_2(max(width, 32)),
        num_warps=1, **PDL,
    )  # fmt: skip


def index_scores(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    allowed: torch.Tensor | None,
    scores: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """bf16 `scores` [T, M] of the first `visible` (int32 [T]) of `keys` bf16 [M, d]; the rest
    unwritten.

    sum over heads of relu(q . k) w, each step rounded to bf16. `allowed` uint8 [T, ceil(M /
    block_size)] or None: rows of blocks that are 0 there score -inf.
    """
    tokens, heads, width = queries.shape
    capacity = scores.shape[1]
    _index_scores[(triton.cdiv(capacity, KEYS), tokens)](
        queries, weights, keys, visible, allowed if allowed is not None else visible,
        allowed.shape[1] if allowed is not None else 0, scores, capacity, heads,
        D=width, BLOCK_D=triton.next_power_of_2(max(width, 16)),
        HEADS=triton.next_power_of_2(max(heads, 16)), KEYS=KEYS,
        CANDIDATE=block_size if allowed is not None else 0, num_warps=4, **PDL,
    )  # fmt: skip


def choose_rows(scores: torch.Tensor, visible: torch.Tensor, rows: torch.Tensor) -> None:
    """int32 `rows` [T, k]: positions of the k best of the first `visible` bf16 `scores` [T, M].

    In position order, of equals at the cut the oldest, -1 behind them where fewer are above -inf.
    """
    tokens, capacity = scores.shape
    _choose[(tokens,)](
        scores, visible, rows, capacity, rows.shape[1], rows.shape[1],
        GROUP=1, LIST=True, BLOCK=_block(capacity), num_warps=8, **PDL,
    )  # fmt: skip


def choose_blocks(
    scores: torch.Tensor,
    visible: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int,
    keep: int,
) -> None:
    """uint8 `blocks` [T, ceil(M / block_size)]: 1 for the `keep` best blocks of what a query sees.

    A block counts as its best score; the one with the newest visible row is always in. Blocks past
    the visible ones are not written.
    """
    tokens, capacity = scores.shape
    _choose[(tokens,)](
        scores, visible, blocks, capacity, blocks.shape[1], keep,
        GROUP=block_size, LIST=False, BLOCK=_block(triton.cdiv(capacity, block_size)),
        num_warps=8, **PDL,
    )  # fmt: skip


def _block(items: int) -> int:
    return next((block for block in BLOCKS if block >= items), BLOCKS[-1])
