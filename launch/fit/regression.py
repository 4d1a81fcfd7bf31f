"""Fitting a gate to an earlier input, and saying how good it is.

Owns the arithmetic only. A layer's picks follow from its gate's logits, so those are what is
learnt, not the picks: real numbers of every expert say more than which k were best, and few
thousand tokens suffice. The fit is a ridge regression of what the layer's own gate gets wrong on
the earlier input, so with nothing to learn from it is that gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compute.weights import GateWeights

# Multiples of the mean square of an input; what the part kept for it likes best is taken.
PENALTIES = (1e-3, 1e-2, 0.1, 1.0)
NEWTON_STEPS = 25


@dataclass(frozen=True, slots=True)
class Change:
    """What is added to a gate: fp32 `up` [E, r] times `down` [r, D]."""

    up: torch.Tensor
    down: torch.Tensor

    def applied(self, gate: GateWeights) -> GateWeights:
        """The moved gate."""
        return GateWeights(gate.weight.float() + self.up @ self.down, gate.bias)


def fit_changes(
    x: torch.Tensor, logits: torch.Tensor, gate: GateWeights, rank: int
) -> list[Change]:
    """A change for each penalty, fitted so that `gate` on fp32 `x` [T, D] gives `logits` [T, E].

    Of the ridge solution the `rank` directions of the experts that explain most on `x` are kept
    (reduced-rank regression).
    """
    wrong = logits - x @ gate.weight.float().T
    gram, cross = x.T @ x / len(x), x.T @ wrong / len(x)
    eye = torch.eye(x.shape[1], device=x.device)
    changes = []
    for penalty in PENALTIES:
        ridge = gram + penalty * gram.diagonal().mean() * eye
        full = torch.linalg.solve(ridge, cross).T
        # eigh sorts by rising eigenvalue.
        directions = torch.linalg.eigh(full @ gram @ full.T).eigenvectors[:, -rank:]
        changes.append(Change(directions, directions.T @ full))
    return changes


def margins(x: torch.Tensor, gate: GateWeights, top_k: int) -> torch.Tensor:
    """fp32 [T, E]: biased scores less the token's `top_k`-th best, as `compute.predictor` has."""
    biased = F.softplus(x @ gate.weight.float().T).sqrt() + gate.bias
    return biased - biased.topk(top_k, -1).values[:, -1:]


def calibrate(scores: torch.Tensor, picked: torch.Tensor) -> tuple[float, float]:
    """(slope, offset) of log-odds from `scores`, by logistic regression; `picked` is bool.

    Starts from one imaginary pick and miss, so that a clean split stays finite.
    """
    x = torch.cat([scores.flatten().double(), scores.new_zeros(2).double()])
    # Margins may be tiny, and their slope so large that bounded steps would not get there.
    spread = x.std().clamp_min(1e-9)
    x = x / spread
    y = torch.cat([picked.flatten().double(), torch.tensor([0.0, 1.0], device=x.device)])
    design = torch.stack([x, torch.ones_like(x)], 1)
    solution = x.new_zeros(2)
    ridge = 1e-3 * torch.eye(2, dtype=x.dtype, device=x.device)
    for _ in range(NEWTON_STEPS):
        p = torch.sigmoid(design @ solution)
        gradient = design.T @ (y - p) - ridge @ solution
        curvature = (design * (p * (1 - p)).unsqueeze(1)).T @ design + ridge
        # A bounded step: far from the solution the curvature vanishes.
        step = torch.linalg.solve(curvature, gradient)
        solution = solution + step.clamp(-4.0, 4.0)
    slope, offset = (solution / torch.stack([spread, torch.ones_like(spread)])).tolist()
    return slope, offset


@dataclass(frozen=True, slots=True)
class Quality:
    """Shares of picks. `recall_k` and `recall_2k`: among the k or 2k experts named first;
    precision at k is the same as recall. `sure`: of picks of rare experts, how many were named with
    a probability of `SURE` or more, and `sure_right`, how many rare ones named so were picked (NaN
    where none was)."""

    recall_k: float
    recall_2k: float
    sure: float
    sure_right: float


SURE = 0.6


def quality(
    scores: torch.Tensor, picks: torch.Tensor, rare: torch.Tensor, slope: float, offset: float
) -> Quality:
    """Of margins [T, E] against `picks` int64 [T, k]; bool [T, E] says which experts are `rare`."""
    k = picks.shape[1]
    picked = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, picks, True)
    order = scores.topk(min(2 * k, scores.shape[1]), -1).indices
    hits = picked.gather(1, order).float()
    sure = rare & (torch.sigmoid(scores * slope + offset) >= SURE)
    return Quality(
        float(hits[:, :k].sum() / picks.numel()),
        float(hits.sum() / picks.numel()),
        float((sure & picked).sum() / (rare & picked).sum()),
        float((sure & picked).sum() / sure.sum()),
    )
