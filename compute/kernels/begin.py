"""The start of a token: its embedding, and all that follows from its position alone.

Owns the kernel that turns a token id and a position, both on the device, into what the layers read:
so one captured graph serves every token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.numeric import release_next, wait_for_previous


@triton.jit
def _store_turn(cos, sin, row, position, frequency, pair, R: tl.constexpr):
    angle = position.to(tl.float32) * frequency
    tl.store(cos + row * R + pair, tl.cos(angle), mask=pair < R)
    tl.store(sin + row * R + pair, tl.sin(angle), mask=pair < R)


@triton.jit
def _begin_token(
    token, position, embed, plain, yarn, ratios, streams, collapsed, pre, cos, sin, slot,
    window_index, visible, ratio_count, H, window,
    HC: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    at = tl.load(position)
    if tl.program_id(0) > 0:
        column = (tl.program_id(0) - 1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < H
        x = tl.load(embed + tl.load(token) * H + column, mask=inside)
        tl.store(collapsed + column, x, mask=inside)
        for i in tl.static_range(HC):
            tl.store(streams + i * H + column, x, mask=inside)
    else:
        stream = tl.arange(0, HC)
        tl.store(pre + stream, tl.where(stream == 0, 1.0, 0.0))
        pair = tl.arange(0, PAIRS)
        slow = tl.load(yarn + pair, mask=pair < R, other=0.0)
        _store_turn(cos, sin, 0, at, tl.load(plain + pair, mask=pair < R, other=0.0), pair, R)
        _store_turn(cos, sin, 1, at, slow, pair, R)
        for i in range(ratio_count):
            ratio = tl.load(ratios + i)
            _store_turn(cos, sin, 2 + i, at // ratio * ratio, slow, pair, R)
            tl.store(visible + i, ((at + 1) // ratio).to(tl.int32))
        tl.store(slot, (at % window).to(tl.int32))
        seen = tl.maximum(at - (window - 1), 0) + tl.arange(0, WINDOW)
        index = tl.where(seen <= at, seen % window, -1).to(tl.int32)
        tl.store(window_index + tl.arange(0, WINDOW), index, mask=tl.arange(0, WINDOW) < window)


def begin_token(
    token: torch.Tensor,
    position: torch.Tensor,
    embed: torch.Tensor,
    plain: torch.Tensor,
    yarn: torch.Tensor,
    ratios: torch.Tensor,
    streams: torch.Tensor,
    collapsed: torch.Tensor,
    pre: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot: torch.Tensor,
    window_index: torch.Tensor,
    visible: torch.Tensor,
) -> None:
    """What the layers read of one token, from `token` and `position` int64 [1].

    Of `embed` bf16 [V, H]: `streams` bf16 [1, hc, H] and `collapsed` bf16 [1, H]; `pre` fp32
    [1, hc], the first mix. Of frequencies `plain` and `yarn` fp32 [R] and int64 `ratios` [n]: `cos`
    and `sin` fp32 [2 + n, R], rows plain, yarn, and yarn at the first position of each ratio's
    group; `visible` int32 [n], how many groups are full; `slot` int32 [1] and `window_index` int32
    [1, W], the window ring's slots, oldest position first, -1 behind the newest.
    """
    hc, width = streams.shape[1:]
    block = 1024
    _begin_token[(1 + triton.cdiv(width, block),)](
        token, position, embed, plain, yarn, ratios, streams, collapsed, pre, cos, sin, slot,
        window_index, visible, len(ratios), width, window_index.shape[1],
        HC=hc, R=len(plain), PAIRS=triton.next_power_of_2(len(plain)), BLOCK=block,
        WINDOW=triton.next_power_of_2(window_index.shape[1]), num_warps=4, **PDL,
    )  # fmt: skip
