"""The gate: from the shares of its logits to a token's picks and weights, or to a prediction."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.norms import sum_of_splits
from compute.kernels.numeric import release_next, softplus, wait_for_previous


@triton.jit
def _ordered(bits):
    """An fp32's bits as an int32 that orders as it does; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(biased, column, inside):
    """int64 that order experts as their biased scores do, and equal ones by the lower id first: one
    maximum finds both, where an argmax takes the time of two."""
    ordered = _ordered(biased.to(tl.int32, bitcast=True)).to(tl.int64)
    return tl.where(inside, (ordered << 32) | (0x7FFFFFFF - column), -(2**63))


@triton.jit
def _expert_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _score_of(key):
    return _ordered((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _pick(
    logits, stride, bias, ids, weights, experts, scaling,
    slots, first_slot, slot_bytes, table,
    SPLITS: tl.constexpr, PICKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    FIND: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < experts
    x = sum_of_splits(logits, column, inside, stride, SPLITS)
    score = tl.sqrt_rn(softplus(x))
    b = tl.load(bias + column, mask=inside, other=0.0)
    keys = _keys(score + b, column, inside)
    slot = tl.arange(0, PADDED)
    chosen = tl.full((PADDED,), 0x7FFFFFFF, tl.int32)
    for i in range(PICKS):
        best = tl.max(keys, axis=0)
        chosen = tl.where(slot == i, _expert_of(best), chosen)
        keys = tl.where(keys == best, -(2**63), keys)
    weight = tl.sum(tl.where(chosen[:, None] == column[None, :], score[None, :], 0.0), axis=1)
    weight = weight / (tl.sum(weight, axis=0) + 1e-20) * scaling
    # The place of each pick among the ids in ascending order, in which outputs are added.
    place = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), axis=1)
    tl.store(ids + place, chosen, mask=slot < PICKS)
    tl.store(weights + place, weight, mask=slot < PICKS)
    if FIND:
        part = tl.arange(0, 8)
        lies = tl.load(slots + chosen, mask=slot < PICKS, other=-1)[:, None]
        tensor = tl.load(first_slot + part, mask=part < 6, other=0)[None, :]
        address = tl.where(lies < 0, 0, tensor + lies.to(tl.int64) * slot_bytes)
        there = (slot < PICKS)[:, None] & (part < 6)[None, :]
        tl.store(table + place[:, None] * 6 + part[None, :], address, mask=there)


@triton.jit
def _name_next(
    logits, stride, bias, ids, margins, experts, count, looks,
    SPLITS: tl.constexpr, CUT: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < experts
    x = sum_of_splits(logits, column, inside, stride, SPLITS)
    b = tl.load(bias + column, mask=inside, other=0.0)
    keys = _keys(tl.sqrt_rn(softplus(x)) + b, column, inside)
    slot = tl.arange(0, PADDED)
    found = tl.zeros((PADDED,), tl.int64)
    cut = tl.max(keys, axis=0)
    for i in range(looks):
        best = tl.max(keys, axis=0)
        cut = tl.where(i < CUT, best, cut)
        found = tl.where(slot == i, best, found)
        keys = tl.where(keys == best, -(2**63), keys)
    tl.store(ids + slot, _expert_of(found), mask=slot < count)
    tl.store(margins + slot, _score_of(found) - _score_of(cut), mask=slot < count)


@triton.jit
def _route(
    logits, stride, bias, ids, weights, experts, scaling, tokens,
    next_logits, next_bias, predicted, margins, count, looks, slots, first_slot, table, slot_bytes,
    SPLITS: tl.constexpr, PICKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    CUT: tl.constexpr, LOOKS: tl.constexpr, FIND: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    token = tl.program_id(0)
    if token < tokens:
        _pick(
            logits + token * experts, stride, bias, ids + token * PICKS, weights + token * PICKS,
            experts, scaling,
            slots, first_slot, slot_bytes, table + token * PICKS * 6,
            SPLITS, PICKS, PADDED, BLOCK, FIND,
        )  # fmt: skip
    else:
        _name_next(
            next_logits, stride, next_bias, predicted, margins, experts, count, looks,
            SPLITS, CUT, LOOKS, BLOCK,
        )  # fmt: skip


class Prediction(NamedTuple):
    """Of a gate's `logits` fp32 [S, 1, E] and `bias` fp32 [E], `ids` int32 [n]: the n best experts
    by biased score, best first, of equals the lowest id; and `margins` fp32 [n]: each one's biased
    score less the k-th best, k as many as a token picks. n is at most E."""

    logits: torch.Tensor
    bias: torch.Tensor
    ids: torch.Tensor
    margins: torch.Tensor


class Lookup(NamedTuple):
    """Where a layer's experts lie in device memory. `slots` int32 [E]: each one's slot, below 0
    where it has none; `first_slot` int64 [6]: where the tensors of slot 0 lie, those of others
    `slot_bytes` apart each. `table` int64 [T * k, 6] takes the picks' addresses, zeros where one
    has no slot."""

    slots: torch.Tensor
    first_slot: torch.Tensor
    table: torch.Tensor
    slot_bytes: int


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    prediction: Prediction | None = None,
    lookup: Lookup | None = None,
    *,
    scaling: float,
) -> None:
    """Pick experts by sqrt(softplus(logits)) + bias, and weigh them by the score alone.

    `logits` fp32 [S, T, E], the gate product's shares; `bias` fp32 [E]; `ids` int32 and `weights`
    fp32 [T, k]: the k best, of equals the lowest id, in ascending id; weights divided by (their sum
    + 1e-20) and times `scaling`. A `prediction`, whose gate has as many experts and shares as far
    apart, is made at the same time, and a `lookup` of the picks.
    """
    splits, tokens, experts = logits.shape
    picks = ids.shape[1]
    other = prediction or Prediction(logits, bias, ids, weights)
    looks = max(len(other.ids), picks)
    find = lookup or Lookup(ids, ids, ids, 0)
    _route[(tokens + (prediction is not None),)](
        logits, logits.stride(0), bias, ids, weights, experts, scaling, tokens,
        *other, len(other.ids), looks, *find,
        SPLITS=splits, PICKS=picks, PADDED=triton.next_power_of_2(picks),
        BLOCK=triton.next_power_of_2(experts), CUT=picks, LOOKS=triton.next_power_of_2(looks),
        FIND=lookup is not None, num_warps=4, **PDL,
    )  # fmt: skip
