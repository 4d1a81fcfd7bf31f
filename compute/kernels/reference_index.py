"""The arithmetic of the kernels of compressed rows, their index and what is chosen by it.

Owns the part of `compute.kernels.reference` that concerns the compressed KV; imported there, under
the same promises. No product here is formed in `PRODUCT`.
"""

from __future__ import annotations

import torch

from compute import formats
from compute.layers import compressor, indexer
from compute.layers.norm import rms_norm as normalize
from compute.rope import Rotation, rotate_tail


def compress_step(
    shares: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    state: torch.Tensor,
    latent: torch.Tensor,
    rows: torch.Tensor,
    *,
    ratio: int,
    eps: float,
) -> None:
    at, width = int(position), rows.shape[1]
    sums = shares.sum(0)[0]
    state[0, at % ratio] = sums[:width]
    if ratio > 1:
        state[1, at % ratio] = sums[width:]
    if at % ratio == ratio - 1:
        pooled = compressor.pool_groups(state[0], state[1], ratio) if ratio > 1 else state[0]
        y = normalize(pooled.to(torch.bfloat16), weight.float(), eps)
        latent.copy_(y)
        rows[at // ratio] = compressor.compressed_rows(y, Rotation(cos, sin))[0]


def index_key_step(
    shares: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    keys: torch.Tensor,
    *,
    ratio: int,
    eps: float,
) -> None:
    at = int(position)
    if at % ratio == ratio - 1:
        key = normalize(shares.sum(0).to(torch.bfloat16), weight.float(), eps)
        keys[at // ratio] = formats.round_trip_fp4_index(rotate_tail(key, Rotation(cos, sin)))[0]


def index_queries(
    q: torch.Tensor,
    raw: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    queries: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    heads, width = q.shape[1:]
    queries.copy_(formats.round_trip_fp4_index(rotate_tail(q, Rotation(cos, sin))))
    weights.copy_(raw * (width**-0.5 * heads**-0.5))


def index_scores(
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor,
    allowed: torch.Tensor | None,
    scores: torch.Tensor,
    *,
    block_size: int,
) -> None:
    every = indexer.index_scores(queries, keys, weights)
    if allowed is not None:
        reach = indexer.rows_of_blocks(allowed.bool(), block_size, len(keys))
        every = every.masked_fill(~reach, float("-inf"))
    for token, seen in enumerate(visible.tolist()):
        scores[token, :seen] = every[token, :seen]


def choose_rows(scores: torch.Tensor, visible: torch.Tensor, rows: torch.Tensor) -> None:
    rows.fill_(-1)
    for token, seen in enumerate(visible.tolist()):
        found = indexer.choose_rows(scores[token : token + 1, :seen], min(rows.shape[1], seen))[0]
        found = found[found >= 0]
        rows[token, : len(found)] = found


def choose_blocks(
    scores: torch.Tensor,
    visible: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int,
    keep: int,
) -> None:
    for token, seen in enumerate(visible.tolist()):
        if seen:
            reachable = scores[token : token + 1, :seen]
            kept = indexer.candidate_blocks(
                reachable, visible[token : token + 1].long(), block_size, keep
            )
            blocks[token, : kept.shape[1]] = kept[0]
