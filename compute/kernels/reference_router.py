"""What `compute.kernels.router` does, in torch operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compute.kernels.router import Lookup, Prediction


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
    score = F.softplus(logits.sum(0)).sqrt()
    # A stable sort keeps the lowest id first among equals.
    order = (score + bias).sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, : ids.shape[1]].sort(-1).values
    picked = score.gather(1, chosen)
    ids.copy_(chosen)
    weights.copy_(picked / (picked.sum(-1, keepdim=True) + 1e-20) * scaling)
    if prediction is not None:
        biased = F.softplus(prediction.logits.sum(0)[0]).sqrt() + prediction.bias
        best = biased.sort(descending=True, stable=True)
        count = len(prediction.ids)
        prediction.ids.copy_(best.indices[:count])
        prediction.margins.copy_(best.values[:count] - best.values[ids.shape[1] - 1])
    if lookup is not None:
        lies = lookup.slots[chosen.flatten()].long()[:, None]
        lookup.table.copy_((lookup.first_slot + lies * lookup.slot_bytes) * (lies >= 0))
