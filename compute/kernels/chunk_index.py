"""The indexer for many queries, through the kernels of a step.

Owns their outputs only: scores that are -inf where a query sees nothing, choices as new tensors.
"""

from __future__ import annotations

import torch

from compute.kernels import indexer
from compute.rope import Rotation


def index_queries(
    raw: torch.Tensor, raw_weights: torch.Tensor, turn: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries rotated and on the fp4 grid, and their heads' weights scaled.

    `raw` bf16 [T, heads, d] and `raw_weights` bf16 [T, heads], of which the results have the form.
    """
    queries, weights = torch.empty_like(raw), torch.empty_like(raw_weights)
    indexer.index_queries(raw, raw_weights, turn.cos, turn.sin, queries, weights)
    return queries, weights


def masked_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    visible: torch.Tensor,
    blocks: torch.Tensor | None,
    block_size: int,
) -> torch.Tensor:
    """bf16 [T, n], as `compute.layers.indexer.masked_scores`."""
    scores = queries.new_full((len(queries), len(keys)), -torch.inf)
    allowed = None if blocks is None else blocks.view(torch.uint8)
    indexer.index_scores(
        queries, weights, keys, visible.int(), allowed, scores, block_size=block_size
    )
    return scores


def choose_rows(scores: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [T, k], as `compute.layers.indexer.choose_rows`; -1 comes last."""
    tokens, count = scores.shape
    rows = torch.empty(tokens, k, dtype=torch.int32, device=scores.device)
    indexer.choose_rows(scores, rows.new_full((tokens,), count), rows)
    return rows


def candidate_blocks(
    scores: torch.Tensor, visible: torch.Tensor, block_size: int, keep: int
) -> torch.Tensor:
    """bool [T, ceil(n / block_size)], as `compute.layers.indexer.candidate_blocks`."""
    tokens, count = scores.shape
    blocks = torch.zeros(tokens, -(-count // block_size), dtype=torch.uint8, device=scores.device)
    indexer.choose_blocks(scores, visible.int(), blocks, block_size=block_size, keep=keep)
    return blocks.view(torch.bool)
