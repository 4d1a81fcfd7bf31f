"""How a model uses its experts over a run of tokens: balance overall, locality in short runs.

Owns the definitions. `picks` are int64 [L, T, k]: the experts of every layer and token, in text
order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

WINDOWS = (1, 5, 10, 20, 50, 100, 200)
TOP_PARTS = (8, 4, 2)


def counts(picks: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert is picked, int64 [L, E]."""
    return F.one_hot(picks.flatten(1), experts).sum(1)


def shares(picks: torch.Tensor, experts: int) -> dict[str, float]:
    """The least and most used expert of any layer, as a multiple of a fair share."""
    fair = counts(picks, experts) / (picks.shape[1] * picks.shape[2]) * experts
    return {"least": float(fair.min()), "most": float(fair.max())}


def locality(picks: torch.Tensor, experts: int) -> dict[str, Any]:
    """Of windows of so many tokens, a mean over layers and windows without overlap.

    `working_set`: distinct experts; `if_uniform`: what independent uniform picks would give;
    `top_share`: the part of a window's picks that its most used 1/8, 1/4, 1/2 of experts take.
    """
    layers, length, k = picks.shape
    curves: dict[str, Any] = {"working_set": {}, "if_uniform": {}, "top_share": {}}
    for window in WINDOWS:
        whole = length // window
        if whole == 0:
            continue
        cut = picks[:, : whole * window].reshape(layers * whole, window, k)
        used = counts(cut, experts).float()
        name = str(window)
        curves["working_set"][name] = float((used > 0).float().sum(1).mean())
        curves["if_uniform"][name] = experts * (1 - (1 - k / experts) ** window)
        ordered = used.sort(1, descending=True).values / (window * k)
        curves["top_share"][name] = {
            f"1/{part}": float(ordered[:, : experts // part].sum(1).mean()) for part in TOP_PARTS
        }
    return curves
