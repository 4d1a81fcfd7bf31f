"""The mixture of experts: the router, one expert's product, and the sum in a fixed order.

Experts arrive in any order, so a pick's output waits in its place and the places are summed in
ascending expert id: what was cached or read first never shows in a bit of the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from compute.formats import dequantize_fp4_weight
from compute.layers.linear import linear, linear_fp8, linear_quantized, quantized
from compute.sources import ExpertBytes
from compute.weights import GateWeights, SharedExpertWeights


class Routing(NamedTuple):
    """int64 `picks` [T, k], by biased score descending, and their fp32 `weights` [T, k]."""

    picks: torch.Tensor
    weights: torch.Tensor


def gate_scores(x: torch.Tensor, gate: GateWeights) -> torch.Tensor:
    """fp32 [T, E] = sqrt(softplus(gate x)) of bf16 `x` [T, D]."""
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


def routed_experts(
    x: torch.Tensor,
    routing: Routing,
    picks: list[list[int]],
    arriving: Iterable[tuple[int, ExpertBytes]],
    limit: float,
) -> torch.Tensor:
    """fp32 [T, D]: for each token its picks' outputs, added in ascending expert id.

    `x` [T, D] is `quantized`; `picks` is `routing.picks` on the host; `arriving` yields
    each expert in it once, in any order.
    """
    count, k = routing.picks.shape
    tokens_of: dict[int, list[int]] = {}
    places_of: dict[int, list[int]] = {}
    for token, chosen in enumerate(picks):
        for place, expert in enumerate(sorted(chosen)):
            tokens_of.setdefault(expert, []).append(token)
            places_of.setdefault(expert, []).append(token * k + place)
    weights = routing.weights.gather(1, routing.picks.argsort(-1)).flatten()
    outputs = torch.empty(count * k, x.shape[1], dtype=torch.bfloat16, device=x.device)
    for expert, held in arriving:
        tokens = torch.tensor(tokens_of[expert], device=x.device)
        places = torch.tensor(places_of[expert], device=x.device)
        rows, weight = x.index_select(0, tokens), weights.index_select(0, places)
        outputs.index_copy_(0, places, expert_product(rows, weight, held, limit))
    by_token = outputs.view(count, k, -1)
    total = by_token[:, 0].float()
    for place in range(1, k):
        total += by_token[:, place]
    return total
