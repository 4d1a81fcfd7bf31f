"""The mixture of experts: the router, one expert's product, and the sum in a fixed order.

Experts arrive in any order, so a pick's output waits in its place and the places are summed in
ascending expert id: what was cached or read first never shows in a bit of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from compute.formats import dequantize_fp4_weight
from compute.kernels import chunk_kernels
from compute.layers.linear import linear, linear_fp8, linear_quantized, quantized
from compute.sources import Addresses, ExpertBytes, ExpertSource, PlacedExperts
from compute.weights import GateWeights, SharedExpertWeights
from protocol.config import ModelConfig


class Routing(NamedTuple):
    """int64 `picks` [T, k], by biased score descending, and their fp32 `weights` [T, k]."""

    picks: torch.Tensor
    weights: torch.Tensor


def gate_scores(x: torch.Tensor, gate: GateWeights) -> torch.Tensor:
    """fp32 [T, E] = sqrt(softplus(gate x)) of bf16 `x` [T, D]."""
    # Not `linear_fp32`: scores are compared, and tensor cores cut off what an addition shifts out.
    return F.softplus(F.linear(x.float(), gate.weight.float())).sqrt_()


def route(x: torch.Tensor, gate: GateWeights, top_k: int, scale: float) -> Routing:
    """Choose `top_k` experts by score plus bias and weigh them by their scores without it.

    Weights are the scores at the picks, divided by (their sum + 1e-20), times `scale`.
    """
    scores = gate_scores(x, gate)
    picks = (scores + gate.bias).topk(top_k, -1).indices
    weights = scores.gather(1, picks)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale
    return Routing(picks, weights)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """fp32 silu(gate) * up of bf16 inputs; `up` clamped to +-limit, `gate` from above only."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate = gate.clamp_max(limit)
        up = up.clamp(-limit, limit)
    return F.silu(gate) * up


def expert_product(
    x: torch.Tensor, weight: torch.Tensor, expert: ExpertBytes, limit: float
) -> torch.Tensor:
    """bf16 [n, D] of one fp4 expert; the routing `weight` fp32 [n] multiplies before w2.

    `x` [n, D] is `quantized` already: a token's picks share it.
    """

    def product(by: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return linear(by, dequantize_fp4_weight(packed, scales).to(by.dtype))

    # Small operations cost more than copying the packed bytes: one product for both branches.
    both = torch.cat((expert.w1, expert.w3)), torch.cat((expert.w1_scale, expert.w3_scale))
    gate, up = product(x, *both).chunk(2, -1)
    inner = (swiglu(gate, up, limit) * weight.unsqueeze(-1)).to(torch.bfloat16)
    return product(quantized(inner), expert.w2, expert.w2_scale)


def shared_expert(x: torch.Tensor, weights: SharedExpertWeights, limit: float) -> torch.Tensor:
    """bf16 [T, D] of the expert every token takes, without a routing weight; `x` is quantized."""
    gate, up = linear_quantized(x, weights.w1_w3).chunk(2, -1)
    return linear_fp8(swiglu(gate, up, limit).to(torch.bfloat16), weights.w2)


def pick_counts(routing: Routing, experts: int) -> torch.Tensor:
    """int64 [experts]: how many tokens picked each."""
    picks = routing.picks.flatten()
    return picks.new_zeros(experts).scatter_add_(0, picks, torch.ones_like(picks))


def by_expert(routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """A place, token * k + rank, for each pick, where rank counts a token's picks by expert id.

    int64 [T * k]: the places expert by expert, tokens ascending, and fp32 [T * k]: weights by
    place.
    """
    experts = routing.picks.sort(-1)
    weights = routing.weights.gather(1, experts.indices).flatten()
    return experts.values.flatten().argsort(stable=True), weights


class Arriving(NamedTuple):
    """What a layer asked for: `present` experts at `addresses` [n, 6], which kernels read at any
    time before the source's `release`, and all others one by one."""

    present: Sequence[int]
    addresses: Addresses
    others: Iterable[tuple[int, ExpertBytes]]


def fetch(
    source: ExpertSource, layer: int, experts: Sequence[int], device: torch.device
) -> Arriving:
    """Ask `source` for `experts`, in a way that `routed_experts` can use on `device`."""
    present: Sequence[int] = ()
    addresses = np.empty((0, 6), dtype=np.int64)
    if chunk_kernels(device) is not None and isinstance(source, PlacedExperts):
        present, addresses = source.present(layer, experts)
    there = set(present)
    others = source.fetch(layer, [expert for expert in experts if expert not in there])
    return Arriving(present, addresses, others)


def routed_experts(
    x: torch.Tensor,
    routing: Routing,
    counts: Sequence[int],
    arriving: Arriving,
    config: ModelConfig,
) -> torch.Tensor:
    """fp32 [T, D]: for each token its picks' outputs, added in ascending expert id.

    `x` [T, D] is `quantized`; `counts` is `pick_counts` on the host; `arriving` has each expert
    that was picked once, in any order.
    """
    kernels = chunk_kernels(x.device)
    if kernels is not None:
        summed: torch.Tensor = kernels.routed_experts(x, routing, counts, arriving, config)
        return summed
    count, k = routing.picks.shape
    order, weights = by_expert(routing)
    ends = [0, *accumulate(counts)]
    outputs = torch.empty(count * k, x.shape[1], dtype=torch.bfloat16, device=x.device)
    for expert, held in arriving.others:
        places = order[ends[expert] : ends[expert + 1]]
        rows, weight = x.index_select(0, places // k), weights.index_select(0, places)
        outputs.index_copy_(0, places, expert_product(rows, weight, held, config.swiglu_limit))
    by_token = outputs.view(count, k, -1)
    total = by_token[:, 0].float()
    for place in range(1, k):
        total += by_token[:, place]
    return total
