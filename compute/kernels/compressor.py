"""The compressor's step for one token: its group's state, and the row and index key it completes.

Owns what follows the compressor's products on the device. Whether the token completes a group
depends on its position, which is read there, so one captured graph serves every position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.norms import norm_and_rotate, rotate_pairs, sum_of_splits
from compute.kernels.numeric import (
    as_bf16,
    release_next,
    round_trip_e2m1_index,
    round_trip_e2m1_kv,
    to_bf16,
    wait_for_previous,
)


@triton.jit
def _pooled(
    shares,
    stride,
    state,
    member,
    column,
    mask,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """fp32 of bf16: the softmax-weighted sum of the group whose last member these shares are."""
    kv = sum_of_splits(shares, column, mask, stride, SPLITS)
    if RATIO == 1:
        return to_bf16(kv)
    else:
        gate = sum_of_splits(shares, D + column, mask, stride, SPLITS)
        top = gate
        for t in tl.static_range(RATIO - 1):
            earlier = tl.load(state + (RATIO + t) * D + column, mask=mask, other=0.0)
            top = tl.maximum(top, earlier)
        # Members in order, so that the sums are those of the whole group at once.
        total = tl.zeros(kv.shape, tl.float32)
        weights = tl.zeros(kv.shape, tl.float32)
        for t in tl.static_range(RATIO - 1):
            weight = tl.exp(tl.load(state + (RATIO + t) * D + column, mask=mask, other=0.0) - top)
            weights += weight
            total += weight * tl.load(state + t * D + column, mask=mask, other=0.0)
        weight = tl.exp(gate - top)
        return to_bf16((total + weight * kv) / (weights + weight))


@triton.jit
def _compress_step(
    shares, stride, weight, cos, sin, position, state, latent, rows, eps,
    D: tl.constexpr, ROTATED: tl.constexpr, RATIO: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    at = tl.load(position)
    member = at % RATIO
    column = tl.arange(0, BLOCK)
    mask = column < D
    if member == RATIO - 1:
        pooled = _pooled(shares, stride, state, member, column, mask, D, RATIO, SPLITS)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(tl.where(mask, pooled * pooled, 0.0), axis=0) / D + eps)
        w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
        y = to_bf16(pooled * inverse * w)
        tl.store(latent + column, as_bf16(y), mask=mask)
        other = column ^ 1
        tail = mask & (column >= D - ROTATED)
        p = _pooled(shares, stride, state, member, other, tail, D, RATIO, SPLITS)
        p = to_bf16(p * inverse * tl.load(weight + other, mask=tail, other=0.0).to(tl.float32))
        turned = to_bf16(rotate_pairs(y, p, column, D - ROTATED, D, cos, sin))
        z = tl.reshape(round_trip_e2m1_kv(tl.reshape(turned, (BLOCK // 16, 16))), (BLOCK,))
        tl.store(rows + (at // RATIO) * D + column, as_bf16(z), mask=mask)
    else:
        kv = sum_of_splits(shares, column, mask, stride, SPLITS)
        tl.store(state + member * D + column, kv, mask=mask)
        gate = sum_of_splits(shares, D + column, mask & (RATIO > 1), stride, SPLITS)
        tl.store(state + (RATIO + member) * D + column, gate, mask=mask)


@triton.jit
def _index_key_step(
    shares, stride, weight, cos, sin, position, keys, eps,
    D: tl.constexpr, ROTATED: tl.constexpr, RATIO: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    at = tl.load(position)
    if at % RATIO == RATIO - 1:
        _, y = norm_and_rotate(shares, stride, weight, cos, sin, eps, D, ROTATED, SPLITS, BLOCK)
        z = tl.reshape(round_trip_e2m1_index(tl.reshape(y, (BLOCK // 32, 32))), (BLOCK,))
        column = tl.arange(0, BLOCK)
        tl.store(keys + (at // RATIO) * D + column, as_bf16(z), mask=column < D)


def compress_step(
    shares: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    state: torch.Tensor,
    latent: torch.Tensor,
    rows: torch.Tensor,
    *,
    ratio: int,
    eps: float,
) -> None:
    """Take one token into its group, and where it is the last one, write the group's row.

    `shares` fp32 [S, 1, D] (ratio 1) or [S, 1, 2 D], shares of the kv product, then of the gate's;
    `position` int64 [1]; `state` fp32 [2, ratio, D], kv and gates of a filling group. When
    (position + 1) % ratio is 0: `latent` bf16 [1, D] (before rotation) and row position // ratio of
    `rows` bf16 [M, D] (rotated by `cos`, `sin` fp32 [1, rotated / 2] of the group's first position,
    on the fp4 grid) are written; else only `state` is.
    """
    width = rows.shape[1]
    _compress_step[(1,)](
        shares, shares.stride(0), weight, cos, sin, position, state, latent, rows, eps,
        D=width, ROTATED=2 * cos.shape[1], RATIO=ratio, SPLITS=shares.shape[0],
        BLOCK=triton.next_power_of_2(max(width, 32)), num_warps=4, **PDL,
    )  # fmt: skip


def index_key_step(
    shares: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    keys: torch.Tensor,
    *,
    ratio: int,
    eps: float,
) -> None:
    """Where the token completes a group, write its index key: row position // ratio of `keys`.

    `shares` fp32 [S, 1, d] of the product with the group's latent; `keys` bf16 [M, d]: rms norm,
    rotated as in `compress_step`, on the fp4 grid.
    """
    width = keys.shape[1]
    _index_key_step[(1,)](
        shares, shares.stride(0), weight, cos, sin, position, keys, eps,
        D=width, ROTATED=2 * cos.shape[1], RATIO=ratio, SPLITS=shares.shape[0],
        BLOCK=triton.next_power_of_2(max(width, 32)), num_warps=1, **PDL,
    )  # fmt: skip
