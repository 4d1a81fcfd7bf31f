"""Normalization between the products of a decode step, with the rounding the next product takes.

Owns the two small kernels that stand between matrix-vector products: the norm in front of a
sublayer, and what follows the query and key-value down projections (norms, rotation, rounding, the
window row). One program a vector.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.limbs import Limbs, store_limbs
from compute.kernels.numeric import (
    as_bf16,
    release_next,
    round_trip_e4m3,
    to_bf16,
    wait_for_previous,
)


@triton.jit
def sum_of_splits(partials, at, mask, stride, SPLITS: tl.constexpr):
    """fp32 sums of `SPLITS` shares at offsets `at`, added in order."""
    total = tl.load(partials + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partials + split * stride + at, mask=mask, other=0.0)
    return total


@triton.jit
def rotate_pairs(x, partner, column, kept, end, cos, sin):
    """fp32 `x` at `column` turned with its `partner` (the other of its pair) in kept..end."""
    pair = (column - kept) // 2
    # Bounded on both sides: a vector is padded to a power of two, the angles are not.
    turned = (column >= kept) & (column < end)
    c = tl.load(cos + pair, mask=turned, other=1.0)
    s = tl.load(sin + pair, mask=turned, other=0.0)
    return x * c + tl.where(column % 2 == 0, -s, s) * partner


@triton.jit
def _rms_norm(
    x, weight, normed, rounded, limbs, limb_stride, sums, scales, D, eps,
    BLOCK: tl.constexpr, NORMED: tl.constexpr, ROUNDED: tl.constexpr, LIMBS: tl.constexpr,
):  # fmt: skip
    release_next()
    column = tl.arange(0, BLOCK)
    mask = column < D
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous()
    at = tl.program_id(0) * D + column
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(v * v, axis=0) / D + eps)
    y = to_bf16(v * inverse * w)
    if NORMED:
        tl.store(normed + at, as_bf16(y), mask=mask)
    if ROUNDED:
        z = tl.reshape(round_trip_e4m3(tl.reshape(y, (BLOCK // 32, 32))), (BLOCK,))
        tl.store(rounded + at, as_bf16(z), mask=mask)
    if LIMBS:
        row = tl.program_id(0)
        group = row * (D // 32)
        store_limbs(
            y, mask, limbs + row * D, limb_stride, sums + group, scales + group, 0, D, BLOCK
        )


@triton.jit
def _quantize(
    x, rounded, limbs, limb_stride, sums, scales, D,
    BLOCK: tl.constexpr, ROUNDED: tl.constexpr, LIMBS: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    row, first = tl.program_id(1), tl.program_id(0) * BLOCK
    column = first + tl.arange(0, BLOCK)
    mask = column < D
    y = tl.load(x + row * D + column, mask=mask, other=0.0).to(tl.float32)
    if ROUNDED:
        z = tl.reshape(round_trip_e4m3(tl.reshape(y, (BLOCK // 32, 32))), (BLOCK,))
        tl.store(rounded + row * D + column, as_bf16(z), mask=mask)
    if LIMBS:
        group = row * (D // 32)
        store_limbs(
            y, mask, limbs + row * D, limb_stride, sums + group, scales + group, first, D, BLOCK
        )


@triton.jit
def _finish_query(
    partials, stride, weight, query, eps, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    mask = column < D
    v = to_bf16(sum_of_splits(partials, column, mask, stride, SPLITS))
    inverse = 1.0 / tl.sqrt_rn(tl.sum(v * v, axis=0) / D + eps)
    y = to_bf16(v * inverse * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32))
    z = tl.reshape(round_trip_e4m3(tl.reshape(y, (BLOCK // 32, 32))), (BLOCK,))
    tl.store(query + column, as_bf16(z), mask=mask)


@triton.jit
def norm_and_rotate(
    partials, stride, weight, cos, sin, eps,
    D: tl.constexpr, ROTATED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK] of bf16: the rms norm of summed shares, before and after its tail is rotated."""
    column = tl.arange(0, BLOCK)
    mask = column < D
    v = to_bf16(sum_of_splits(partials, column, mask, stride, SPLITS))
    inverse = 1.0 / tl.sqrt_rn(tl.sum(v * v, axis=0) / D + eps)
    y = to_bf16(v * inverse * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32))
    tail = mask & (column >= D - ROTATED)
    other = column ^ 1
    p = to_bf16(sum_of_splits(partials, other, tail, stride, SPLITS))
    p = to_bf16(p * inverse * tl.load(weight + other, mask=tail, other=0.0).to(tl.float32))
    return y, to_bf16(rotate_pairs(y, p, column, D - ROTATED, D, cos, sin))


@triton.jit
def _finish_kv(
    partials, stride, weight, cos, sin, row, eps,
    D: tl.constexpr, ROTATED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _, y = norm_and_rotate(partials, stride, weight, cos, sin, eps, D, ROTATED, SPLITS, BLOCK)
    z = tl.reshape(round_trip_e4m3(tl.reshape(y, (BLOCK // 32, 32))), (BLOCK,))
    column = tl.arange(0, BLOCK)
    tl.store(row + column, as_bf16(z), mask=column < D)


@triton.jit
def _finish_query_kv(
    partials, stride, q_weight, kv_weight, cos, sin, slots, query, rows, eps,
    QD: tl.constexpr, KD: tl.constexpr, ROTATED: tl.constexpr, SPLITS: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    token = tl.program_id(0)
    partials += token * (QD + KD)
    if tl.program_id(1) == 0:
        _finish_query(partials, stride, q_weight, query + token * QD, eps, QD, SPLITS, Q_BLOCK)
    else:
        at = token * (ROTATED // 2)
        row = rows + tl.load(slots + token).to(tl.int64) * KD
        _finish_kv(
            partials + QD, stride, kv_weight, cos + at, sin + at, row, eps,
            KD, ROTATED, SPLITS, K_BLOCK,
        )  # fmt: skip


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    normed: torch.Tensor | None,
    rounded: torch.Tensor | None,
    limbs: Limbs | None = None,
    *,
    eps: float,
) -> None:
    """bf16(weight * x / sqrt(mean(x^2) + eps)) of bf16 `x` [T, D], as the products after it take
    it.

    `normed` takes it as it is, `rounded` quantized and dequantized (each bf16 [T, D]), `limbs`
    quantized for fp4 products; any may be None.
    """
    tokens, width = x.shape
    block = triton.next_power_of_2(max(width, 32))
    _rms_norm[(tokens,)](
        x, weight, normed if normed is not None else x, rounded if rounded is not None else x,
        limbs.bytes if limbs else x, limbs.bytes.stride(0) if limbs else 0,
        limbs.sums if limbs else x, limbs.scales if limbs else x, width, eps,
        BLOCK=block, NORMED=normed is not None, ROUNDED=rounded is not None, LIMBS=limbs is not
        None, num_warps=max(1, min(16, block // 512)), **PDL,
    )  # fmt: skip


def quantize(x: torch.Tensor, rounded: torch.Tensor | None, limbs: Limbs | None = None) -> None:
    """bf16 `x` [n, D] as the next product takes it: `rounded` bf16 [n, D], or `limbs`, or both."""
    count, width = x.shape
    block = 128
    _quantize[(triton.cdiv(width, block), count)](
        x, rounded if rounded is not None else x,
        limbs.bytes if limbs else x, limbs.bytes.stride(0) if limbs else 0,
        limbs.sums if limbs else x, limbs.scales if limbs else x, width,
        BLOCK=block, ROUNDED=rounded is not None, LIMBS=limbs is not None, num_warps=1, **PDL,
    )  # fmt: skip


def finish_query_kv(
    partials: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor,
    rows: torch.Tensor,
    *,
    eps: float,
) -> None:
    """From the down projections' shares to the rounded query latent and the window's new rows.

    `partials` fp32 [S, T, q_lora_rank + head_dim]; `cos`, `sin` fp32 [T, rotated / 2] of the
    tokens' positions; `query` bf16 [T, q_lora_rank] = round trip of its rms norm; row `slots[t]`
    (int32 [T]) of `rows` bf16 [R, head_dim] = fp8 round trip of the normed, rotated key-value
    vector.
    """
    splits, tokens, width = partials.shape
    head_dim = rows.shape[1]
    latent = width - head_dim
    _finish_query_kv[(tokens, 2)](
        partials, partials.stride(0), q_weight, kv_weight, cos, sin, slots, query, rows, eps,
        QD=latent, KD=head_dim, ROTATED=2 * cos.shape[1], SPLITS=splits,
        Q_BLOCK=triton.next_power_of_2(max(latent, 32)),
        K_BLOCK=triton.next_power_of_2(max(head_dim, 32)),
        num_warps=4, **PDL,
    )  # fmt: skip
