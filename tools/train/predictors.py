"""How well a layer's experts can be named before its gate has run.

Owns the predictors and their measure: recall of the next layer's picks, over all picks and over
those that an LRU cache of half the experts would miss. Fitted predictors learn from the first half
of the
text and all are measured on the second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tools.train.moe import Gate

RIDGE = 1e-2
CACHED_PART = 0.5


def recalls(
    picks: torch.Tensor, inputs: torch.Tensor, gates: Sequence[Gate], experts: int
) -> dict[str, Any]:
    """Recall at k and 2k of each predictor; `picks` [L, T, k], `inputs` bf16 [L, T, H]."""
    layers, length, k = picks.shape
    half = length // 2
    test = slice(half, length)
    missed = misses(picks, experts)[:, test]
    found: dict[str, list[torch.Tensor]] = {}
    for layer in range(1, layers):
        chosen = F.one_hot(picks[layer], experts).sum(1)
        scores = {
            "next_gate": _gate_scores(inputs[layer - 1, test], gates[layer]),
            "linear": _fitted(inputs[layer - 1], chosen, half),
            "linear_two_before": _fitted(inputs[max(layer - 2, 0)], chosen, half),
            "token_before": chosen[half - 1 : -1].float() + chosen[:half].float().mean(0),
            "popularity": chosen[:half].float().mean(0).expand(length - half, -1),
        }
        for name, score in scores.items():
            found.setdefault(name, []).append(score)
    wanted = picks[1:, test]
    return {
        name: {
            f"top{width}": _recall(torch.stack(score), wanted, missed[1:], width)
            for width in (k, 2 * k)
        }
        for name, score in found.items()
    }


def misses(picks: torch.Tensor, experts: int) -> torch.Tensor:
    """Bool [L, T, k]: picks absent from one LRU cache over all layers, of CACHED_PART of
    experts."""
    layers, length, _ = picks.shape
    room = int(CACHED_PART * layers * experts)
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    absent = torch.zeros(picks.shape, dtype=torch.bool)
    listed = picks.tolist()
    for token in range(length):
        for layer in range(layers):
            for place, expert in enumerate(listed[layer][token]):
                key = (layer, expert)
                absent[layer, token, place] = key not in cache
                cache[key] = None
                cache.move_to_end(key)
                if len(cache) > room:
                    cache.popitem(last=False)
    return absent


def _gate_scores(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    weight, bias = gate.weight.detach().cpu(), gate.bias.detach().cpu()
    return torch.sqrt(F.softplus(x.float() @ weight.float().T)) + bias


def _fitted(x: torch.Tensor, chosen: torch.Tensor, half: int) -> torch.Tensor:
    """Ridge regression of `chosen` on `x` over the first half, its scores on the second."""
    wide = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
    known = wide[:half]
    gram = known.T @ known + RIDGE * half * torch.eye(wide.shape[1], dtype=torch.float64)
    fit: torch.Tensor = torch.linalg.solve(gram, known.T @ chosen[:half].double())
    return (wide[half:] @ fit).float()


def _recall(
    scores: torch.Tensor, wanted: torch.Tensor, missed: torch.Tensor, width: int
) -> dict[str, float]:
    named = torch.zeros_like(scores, dtype=torch.bool)
    named.scatter_(-1, scores.topk(width).indices, True)
    hit = named.gather(-1, wanted)
    return {"of_picks": float(hit.float().mean()), "of_misses": float(hit[missed].float().mean())}
