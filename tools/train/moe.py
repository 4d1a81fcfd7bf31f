"""Mixture of experts for training: every expert in one batched product, with room for so many
tokens.

Owns routing, its balancing bias, and the dispatch to experts' slots and back. An expert has room
for
`capacity` times its fair share of the tokens; what does not fit is dropped and counted. At
evaluation the room is all tokens, as in inference.
T tokens, E experts, k picks a token, C slots an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from protocol.config import ModelConfig
from tools.train import rounding
from tools.train.fused import fused
from tools.train.parameters import Matrix, fp8_linear


class SharedExpert(nn.Module):
    """The expert that every token passes, stored in fp8."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = Matrix(config.moe_intermediate_size, config.hidden_size)
        self.w3 = Matrix(config.moe_intermediate_size, config.hidden_size)
        self.w2 = Matrix(config.hidden_size, config.moe_intermediate_size, zero=True)


class Experts(nn.Module):
    """All routed experts of a layer: w1, w3 [E, I, H] and w2 [E, H, I], stored in fp4."""

    def __init__(self, config: ModelConfig, count: int) -> None:
        super().__init__()
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        self.w1 = nn.Parameter(torch.randn(count, inner, hidden) * hidden**-0.5)
        self.w3 = nn.Parameter(torch.randn(count, inner, hidden) * hidden**-0.5)
        # Unlike the shared expert's not zero: experts that all answer 0 could not be told apart.
        self.w2 = nn.Parameter(torch.randn(count, hidden, inner) * 0.1 * inner**-0.5)


class Gate(nn.Module):
    """Scores of all experts; `bias` only chooses and is moved by load, not by a gradient."""

    def __init__(self, config: ModelConfig, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(count, config.hidden_size) * config.hidden_size**-0.5
        )
        self.register_buffer("bias", torch.zeros(count))
        self.bias: torch.Tensor


class Moe(nn.Module):
    """One layer's gate, routed experts and shared expert."""

    def __init__(self, config: ModelConfig, count: int, picks: int, run: int = 0) -> None:
        """With `run`, T is a multiple of it and every training pass leaves `scatter`."""
        super().__init__()
        self.config, self.count, self.picks, self.run = config, count, picks, run
        self.gate = Gate(config, count)
        self.experts = Experts(config, count)
        self.shared_experts = SharedExpert(config)
        self.capacity = 1.5
        self.register_buffer("load", torch.zeros(count), persistent=False)
        self.load: torch.Tensor
        self.scatter: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """bf16 [T, H] -> bf16 [T, H]; leaves each expert's share of the picks in `load`."""
        chosen, weights = route(
            x, self.gate.weight, self.gate.bias, self.picks, self.config.routed_scaling_factor
        )
        room = slots_per_expert(len(x), self.picks, self.count, self.capacity, self.training)
        slot_of_pick, pick_of_slot, load = place(chosen, self.count, room)
        self.load = load.detach()
        if self.training and self.run:
            self.scatter = scatter(x, self.gate.weight, self.run)
        shared, experts = self.shared_experts, self.experts
        return _experts(
            x, weights, slot_of_pick, pick_of_slot,
            experts.w1, experts.w3, experts.w2,
            shared.w1.weight, shared.w3.weight, shared.w2.weight,
            self.config.swiglu_limit,
        )  # fmt: skip

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Make overloaded experts less likely and underloaded ones more, by `speed` each."""
        self.gate.bias += speed * torch.sign(self.load.mean() - self.load)


def slots_per_expert(tokens: int, picks: int, experts: int, capacity: float, training: bool) -> int:
    """C: a multiple of 8 slots, all tokens outside training."""
    if not training:
        return tokens
    return min(tokens, -(-int(capacity * tokens * picks / experts) // 8) * 8)


@fused
def route(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, picks: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 [T, k] (best biased score first) and their weights fp32 [T, k]."""
    stored = rounding.stored_bf16(gate).float()
    scores = torch.sqrt(F.softplus(F.linear(x.float(), stored)))
    biased = scores.detach() + bias
    chosen = []
    numbers = torch.arange(biased.shape[-1], device=x.device)
    # k passes of a fused maximum are cheaper than a sort of many short rows.
    for _ in range(picks):
        best = biased.argmax(-1, keepdim=True)
        chosen.append(best)
        biased = biased.masked_fill(numbers == best, -torch.inf)
    indices = torch.cat(chosen, -1)
    weights = scores.gather(-1, indices)
    return indices, weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling


@fused
def scatter(x: torch.Tensor, gate: torch.Tensor, run: int) -> torch.Tensor:
    """The part of the variance of all experts' logits that lies within runs of `run` tokens.

    Between 0 (tokens of one run all route alike) and 1 (a run's mean says nothing); independent of
    the logits' size, so it can be lowered only by routing on what neighbours have in common.
    """
    logits = F.linear(x.float(), rounding.stored_bf16(gate).float())
    runs = logits.unflatten(0, (-1, run))
    within: torch.Tensor = (runs - runs.mean(1, keepdim=True)).square().mean()
    return within / ((logits - logits.mean(0)).square().mean() + 1e-12)


@torch.no_grad()
def place(
    chosen: torch.Tensor, experts: int, room: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each pick goes: slot [T * k] (E * C where dropped), pick of each slot [E * C] (T * k
    where empty), and the share of all picks that each expert got [E]."""
    flat = chosen.flatten()
    expert, order = torch.sort(flat, stable=True)
    load = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    load.scatter_add_(0, flat, torch.ones_like(flat))
    first = torch.cumsum(load, 0) - load
    rank = torch.arange(len(flat), device=flat.device) - first[expert]
    slot = torch.where(rank < room, expert * room + rank, experts * room)
    slot_of_pick = torch.empty_like(flat).scatter_(0, order, slot)
    pick_of_slot = torch.full((experts * room + 1,), len(flat), device=flat.device)
    pick_of_slot.scatter_(0, slot, order)
    return slot_of_pick, pick_of_slot[:-1], load / len(flat)


class _Dispatch(torch.autograd.Function):
    """[T, H] -> [E * C, H], zeros in empty slots. Both directions are gathers: the gradient of a
    plain gather would be additions in no fixed order."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        slot_of_pick: torch.Tensor,
        pick_of_slot: torch.Tensor,
        picks: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(slot_of_pick)
        ctx.shape = (len(x), picks)
        return _gather(x, pick_of_slot // picks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (slot_of_pick,) = ctx.saved_tensors
        picked = _gather(grads[0], slot_of_pick).view(*ctx.shape, -1)
        return picked.float().sum(1).to(grads[0].dtype), None, None, None


class _Combine(torch.autograd.Function):
    """[E * C, H] -> [T * k, H], zeros where a pick was dropped."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, slot_of_pick: torch.Tensor, pick_of_slot: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(pick_of_slot)
        return _gather(y, slot_of_pick)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (pick_of_slot,) = ctx.saved_tensors
        return _gather(grads[0], pick_of_slot), None, None


def _dispatch(
    x: torch.Tensor, slot_of_pick: torch.Tensor, pick_of_slot: torch.Tensor, picks: int
) -> torch.Tensor:
    out: torch.Tensor = _Dispatch.apply(  # type: ignore[no-untyped-call]
        x, slot_of_pick, pick_of_slot, picks
    )
    return out


def _combine(
    y: torch.Tensor, slot_of_pick: torch.Tensor, pick_of_slot: torch.Tensor
) -> torch.Tensor:
    out: torch.Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
        y, slot_of_pick, pick_of_slot
    )
    return out


def _gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of `x`; zeros for index len(x)."""
    inside = index < len(x)
    return x[torch.where(inside, index, 0)] * inside[:, None]


def _swiglu(g: torch.Tensor, u: torch.Tensor, limit: float) -> torch.Tensor:
    """fp32 silu(g) * u with the model's clamps, of bf16 products."""
    return F.silu(g.float().clamp(max=limit)) * u.float().clamp(-limit, limit)


@fused
def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    slot_of_pick: torch.Tensor,
    pick_of_slot: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor,
    w2: torch.Tensor,
    shared_w1: torch.Tensor,
    shared_w3: torch.Tensor,
    shared_w2: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    picks = weights.shape[-1]
    rounded = rounding.activation(x)
    slots = _dispatch(rounded, slot_of_pick, pick_of_slot, picks).unflatten(0, (len(w1), -1))
    g = torch.bmm(slots, rounding.fp4_weight(w1).transpose(1, 2))
    u = torch.bmm(slots, rounding.fp4_weight(w3).transpose(1, 2))
    weight = _combine(weights.flatten()[:, None], pick_of_slot, slot_of_pick)
    a = weight.view(*slots.shape[:2], 1) * _swiglu(g, u, limit)
    a = rounding.activation(a.to(torch.bfloat16))
    out = torch.bmm(a, rounding.fp4_weight(w2).transpose(1, 2)).flatten(0, 1)
    routed = _combine(out, slot_of_pick, pick_of_slot).view(len(x), picks, -1).float().sum(1)

    g, u = fp8_linear(x, shared_w1), fp8_linear(x, shared_w3)
    shared = fp8_linear(_swiglu(g, u, limit).to(torch.bfloat16), shared_w2)
    return (routed + shared.float()).to(torch.bfloat16)
