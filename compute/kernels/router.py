"""The gate: from the shares of its logits to a token's picks and weights, or to a prediction."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.norms import sum_of_splits
from compute.kernels.numeric import release_next, softplus, wait_for_previous


@triton.jit
def _route(
    logits, stride, bias, ids, weights, experts, inverse_temperature, scaling,
    SPLITS: tl.constexpr, PICKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    release_next()
    column = tl.arange(0, BLOCK)
    inside = column < experts
    b = tl.load(bias + column, mask=inside, other=0.0)
    wait_for_previous()
    token = tl.program_id(0)
    x = sum_of_splits(logits + token * experts, column, inside, stride, SPLITS)
    score = tl.sqrt_rn(softplus(x * inverse_temperature))
    biased = tl.where(inside, score + b, float("-inf"))
    slot = tl.arange(0, PADDED)
    chosen = tl.full((PADDED,), 0x7FFFFFFF, tl.int32)
    weight = tl.zeros((PADDED,), tl.float32)
    for i in range(PICKS):
        best = tl.argmax(biased, axis=0, tie_break_left=True)
        at_best = column == best
        chosen = tl.where(slot == i, best, chosen)
        weight = tl.where(slot == i, tl.sum(tl.where(at_best, score, 0.0), axis=0), weight)
        biased = tl.where(at_best, float("-inf"), biased)
    weight = weight / (tl.sum(weight, axis=0) + 1e-20) * scaling
    # The place of each pick among the ids in ascending order, in which outputs are added.
    place = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), axis=1)
    tl.store(ids + token * PICKS + place, chosen, mask=slot < PICKS)
    tl.store(weights + token * PICKS + place, weight, mask=slot < PICKS)


@triton.jit
def _predict(
    logits, stride, bias, ids, margins, experts, count, looks,
    SPLITS: tl.constexpr, CUT: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    release_next()
    column = tl.arange(0, BLOCK)
    inside = column < experts
    b = tl.load(bias + column, mask=inside, other=0.0)
    wait_for_previous()
    x = sum_of_splits(logits, column, inside, stride, SPLITS)
    biased = tl.where(inside, tl.sqrt_rn(softplus(x)) + b, float("-inf"))
    slot = tl.arange(0, PADDED)
    chosen = tl.zeros((PADDED,), tl.int32)
    score = tl.zeros((PADDED,), tl.float32)
    cut = tl.max(biased, axis=0)
    for i in range(looks):
        best = tl.argmax(biased, axis=0, tie_break_left=True)
        top = tl.max(biased, axis=0)
        cut = tl.where(i < CUT, top, cut)
        chosen = tl.where(slot == i, best, chosen)
        score = tl.where(slot == i, top, score)
        biased = tl.where(column == best, float("-inf"), biased)
    tl.store(ids + slot, chosen, mask=slot < count)
    tl.store(margins + slot, score - cut, mask=slot < count)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    scaling: float,
    temperature: float = 1.0,
) -> None:
    """Pick experts by sqrt(softplus(logits / temperature)) + bias, and weigh them by the score
    alone.

    `logits` fp32 [S, T, E], the gate product's shares; `bias` fp32 [E]; `ids` int32 and `weights`
    fp32 [T, k]: the k best, of equals the lowest id, in ascending id; weights divided by (their sum
    + 1e-20) and times `scaling`.
    """
    splits, tokens, experts = logits.shape
    picks = ids.shape[1]
    _route[(tokens,)](
        logits, logits.stride(0), bias, ids, weights, experts, 1.0 / temperature, scaling,
        SPLITS=splits, PICKS=picks, PADDED=triton.next_power_of_2(picks),
        BLOCK=triton.next_power_of_2(experts), num_warps=4, **PDL,
    )  # fmt: skip


def predict(
    logits: torch.Tensor,
    bias: torch.Tensor,
    ids: torch.Tensor,
    margins: torch.Tensor,
    *,
    top_k: int,
) -> None:
    """The n best experts of one token by biased score, and how far each lies above the cut.

    `logits` fp32 [S, 1, E] of a gate; `ids` int32 [n], best first, of equals the lowest id;
    `margins` fp32 [n]: the biased score less the `top_k`-th best one. n and `top_k` are at most E.
    """
    splits, _, experts = logits.shape
    count = len(ids)
    looks = max(count, top_k)
    _predict[(1,)](
        logits, logits.stride(0), bias, ids, margins, experts, count, looks,
        SPLITS=splits, CUT=top_k, PADDED=triton.next_power_of_2(looks),
        BLOCK=triton.next_power_of_2(experts), num_warps=4, **PDL,
    )  # fmt: skip
