"""The residual highway: mixes of the streams, and putting a sublayer's output back.

Owns three kernels: the dot of the flattened streams with the mixing matrix (split along its
length), the Sinkhorn finish of its 24 sums, and the standalone put-back with the collapse that the
next sublayer reads (one-token products do that in their own last lines, with the same
`mix_streams`). The collapse uses the mix made one sublayer earlier, so it needs no finish of this
one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.dense import mix_streams
from compute.kernels.launching import PDL
from compute.kernels.numeric import release_next, sigmoid, to_bf16, wait_for_previous

#: Columns of the flattened streams one program of the dot takes.
SLICE = 512
#: Tokens one program of the dot takes, so that the matrix is read once for all of them.
TOKENS = 8
#: Width of a row of sums: the mixes, the sum of squares behind them, and padding.
SUMS = 32


def mix_splits(width: int) -> int:
    """How many slices the dot of `width` flattened stream columns has: rows of its `sums`."""
    splits: int = triton.cdiv(width, SLICE)
    return splits


@triton.jit
def _mix_dot(
    streams, matrix, sums, tokens, WIDTH, MIXES: tl.constexpr,
    SLICE: tl.constexpr, TOKENS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    release_next()
    k = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    m = tl.arange(0, SUMS)
    f = tl.load(
        matrix + m[:, None] * WIDTH + k[None, :],
        mask=(m < MIXES)[:, None] & (k < WIDTH)[None, :],
        other=0.0,
    )
    wait_for_previous()
    for i in range(TOKENS):
        token = tl.program_id(1) * TOKENS + i
        if token < tokens:
            s = tl.load(streams + token.to(tl.int64) * WIDTH + k, mask=k < WIDTH, other=0.0)
            s = s.to(tl.float32)
            # The row after the mixes carries the squares.
            factor = tl.where((m == MIXES)[:, None], s[None, :], f)
            at = (tl.program_id(0) * tokens + token) * SUMS + m
            tl.store(sums + at, tl.sum(factor * s[None, :], axis=1))


@triton.jit
def _mix_finish(
    sums, scale, base, pre, post, comb, tokens, WIDTH, splits, norm_eps, eps,
    HC: tl.constexpr, ITERATIONS: tl.constexpr, SUMS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    token = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    there = split < splits
    rows = sums + (split * tokens + token) * SUMS
    i = tl.arange(0, HC)
    entry = 2 * HC + i[:, None] * HC + i[None, :]
    squares = tl.sum(tl.load(rows + (2 + HC) * HC, mask=there, other=0.0), axis=0)
    inverse = 1.0 / tl.sqrt_rn(squares / WIDTH + norm_eps)
    m = tl.sum(tl.load(rows[:, None] + i[None, :], mask=there[:, None], other=0.0), axis=0)
    m = m * inverse * tl.load(scale) + tl.load(base + i)
    tl.store(pre + token * HC + i, sigmoid(m) + eps)
    m = tl.sum(tl.load(rows[:, None] + HC + i[None, :], mask=there[:, None], other=0.0), axis=0)
    m = m * inverse * tl.load(scale + 1) + tl.load(base + HC + i)
    tl.store(post + token * HC + i, 2.0 * sigmoid(m))
    c = tl.sum(
        tl.load(rows[:, None, None] + entry[None, :, :], mask=there[:, None, None], other=0.0),
        axis=0,
    )
    c = c * inverse * tl.load(scale + 2) + tl.load(base + entry)
    c = tl.exp(c - tl.max(c, axis=1)[:, None])
    c = c / tl.sum(c, axis=1)[:, None] + eps
    c = c / (tl.sum(c, axis=0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        c = c / (tl.sum(c, axis=1)[:, None] + eps)
        c = c / (tl.sum(c, axis=0)[None, :] + eps)
    tl.store(comb + token * HC * HC + i[:, None] * HC + i[None, :], c)


@triton.jit
def _post(
    parts, extra, streams, post, comb, pre, collapsed, H,
    PARTS: tl.constexpr, EXTRA: tl.constexpr, HC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    y = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        at = (token * PARTS + part) * H + column
        y += tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    if EXTRA:
        y += tl.load(extra + token * H + column, mask=inside, other=0.0).to(tl.float32)
    mix_streams(
        to_bf16(y), column, inside, streams + token * HC * H, post + token * HC,
        comb + token * HC * HC, pre + token * HC, collapsed + token * H, H, HC,
    )  # fmt: skip


def mix_dot(streams: torch.Tensor, matrix: torch.Tensor, sums: torch.Tensor) -> None:
    """Shares of the mixing sums of bf16 `streams` [T, hc, H] with fp32 `matrix` [(2+hc)hc, hc*H].

    `sums` fp32 [mix_splits(hc*H), T, 32]: per slice the (2+hc)hc dots, then the slice's sum of
    squares.
    """
    tokens, width = streams.shape[0], matrix.shape[1]
    _mix_dot[(mix_splits(width), triton.cdiv(tokens, TOKENS))](
        streams, matrix, sums, tokens, width, MIXES=matrix.shape[0],
        SLICE=SLICE, TOKENS=min(TOKENS, tokens), SUMS=SUMS, num_warps=8, **PDL,
    )  # fmt: skip


def mix_finish(
    sums: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    pre: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    width: int,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> None:
    """From the shares of `mix_dot` to `pre`, `post` fp32 [T, hc] and `comb` fp32 [T, hc, hc].

    `scale` fp32 [3], `base` fp32 [(2+hc)hc]; `width` = hc * H; `iterations` Sinkhorn passes.
    """
    splits, tokens, _ = sums.shape
    _mix_finish[(tokens,)](
        sums, scale, base, pre, post, comb, tokens, width, splits, norm_eps, eps,
        HC=pre.shape[1], ITERATIONS=iterations, SUMS=SUMS,
        SPLITS=triton.next_power_of_2(splits), num_warps=1, **PDL,
    )  # fmt: skip


def post(
    parts: torch.Tensor,
    extra: torch.Tensor | None,
    streams: torch.Tensor,
    post_mix: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    collapsed: torch.Tensor,
) -> None:
    """Add bf16 `parts` [T, P, H] in order, then `extra` [T, H], and put the sum back into the
    streams.

    y = bf16(sum); `streams` bf16 [T, hc, H] become bf16(post_j y + sum_i comb_ij S_i) in place;
    `collapsed` bf16 [T, H] = bf16(sum_j pre_j S'_j).
    """
    tokens, count, width = parts.shape
    block = 256
    _post[(triton.cdiv(width, block), tokens)](
        parts, extra if extra is not None else parts, streams, post_mix, comb, pre, collapsed,
        width, PARTS=count, EXTRA=extra is not None, HC=streams.shape[1], BLOCK=block, num_warps=2,
        **PDL, )  # fmt: skip
