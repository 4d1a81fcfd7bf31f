"""The indexer: which compressed rows each query reads, with the two-level choice at long context.

Owns scoring, the top-k rule and the candidate blocks. Scores are bf16 and often equal; a tie at the
cut goes to the older row, so the choice depends on the scores alone, on no sorting network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compute.formats import round_trip_fp4_index
from compute.kernels import chunk_kernels
from compute.layers.linear import linear, linear_quantized
from compute.rope import Rotation, rotate_tail
from compute.weights import IndexerWeights
from protocol.config import ModelConfig

SCORE_ELEMENTS = 1 << 24  # head x row scores formed at once, in fp32
SUMMED_ELEMENTS = 1 << 28  # row scores kept at once by kernels, in bf16


@dataclass(slots=True)
class Choice:
    """What an index source hands down the stack, for each of T queries.

    `rows` [T, k], integers: positions in the compressed KV, ascending, -1 where there is none.
    `blocks` bool [T, blocks]: the candidate blocks, from the candidate source on.
    """

    rows: torch.Tensor
    blocks: torch.Tensor | None


def index_queries(
    x: torch.Tensor, latent: torch.Tensor, weights: IndexerWeights, turn: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries bf16 [T, heads, index_head_dim], rotated and on the fp4 grid, and bf16 [T, heads]:
    how much each head counts, scaled by (head_dim * heads)^-0.5.

    bf16 `x` [T, D]; `latent` [T, q_lora_rank] is `quantized`.
    """
    raw_weights = linear(x, weights.weights_proj)
    heads = raw_weights.shape[1]
    raw = linear_quantized(latent, weights.wq_b).view(len(latent), heads, -1)
    kernels = chunk_kernels(x.device)
    if kernels is not None:
        made: tuple[torch.Tensor, torch.Tensor] = kernels.index_queries(raw, raw_weights, turn)
        return made
    scale: float = raw.shape[-1] ** -0.5 * heads**-0.5
    return round_trip_fp4_index(rotate_tail(raw, turn)), raw_weights * scale


def index_scores(queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """bf16 [T, n] = sum over heads of relu(q . k) w, each step rounded to bf16.

    `queries` bf16 [T, heads, d], `keys` bf16 [n, d], `weights` bf16 [T, heads]. On the fp4 grid a
    dot product is exact in fp32, so only the roundings that follow it matter.
    """
    dots = F.linear(queries.float(), keys.float()).to(torch.bfloat16)
    return (dots.relu_() * weights.unsqueeze(-1)).sum(1)


def masked_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    visible: torch.Tensor,
    blocks: torch.Tensor | None,
    block_size: int,
) -> torch.Tensor:
    """`index_scores`, -inf from row `visible` [T] on and, with bool `blocks` [T, ceil(n /
    block_size)], outside of those blocks."""
    kernels = chunk_kernels(queries.device)
    if kernels is not None:
        scores: torch.Tensor = kernels.masked_scores(
            queries, keys, weights, visible, blocks, block_size
        )
        return scores
    scores = index_scores(queries, keys, weights)
    rows = torch.arange(len(keys), device=scores.device)
    scores.masked_fill_(rows >= visible.unsqueeze(1), -torch.inf)
    if blocks is not None:
        scores.masked_fill_(~rows_of_blocks(blocks, block_size, len(keys)), -torch.inf)
    return scores


def top_positions(scores: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [T, k]: where the k largest of bf16 `scores` [T, n] lie; of equals the first ones."""
    bits = (scores + 0.0).view(torch.int16).to(torch.int64)  # + 0.0 makes -0 equal to 0
    ranked = torch.where(bits < 0, bits ^ 0x7FFF, bits)
    place = torch.arange(scores.shape[-1], device=scores.device)
    return ((ranked << 32) - place).topk(k, -1).indices


def choose_rows(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[T, k] integers: the best k rows in position order; a row scored -inf becomes -1."""
    kernels = chunk_kernels(scores.device)
    if kernels is not None:
        rows: torch.Tensor = kernels.choose_rows(scores, k)
        return rows
    best = top_positions(scores, k).sort(-1).values
    return best.masked_fill_(scores.gather(1, best) == -torch.inf, -1)


def candidate_blocks(
    scores: torch.Tensor, visible: torch.Tensor, block_size: int, keep: int
) -> torch.Tensor:
    """bool [T, ceil(n / block_size)]: the blocks whose rows later index sources may choose.

    A block counts as its best row of bf16 `scores` [T, n]; the one with the query's newest visible
    row is always in. `visible` int64 [T] is how many rows a query sees, -inf scores the others.
    """
    kernels = chunk_kernels(scores.device)
    if kernels is not None:
        blocks: torch.Tensor = kernels.candidate_blocks(scores, visible, block_size, keep)
        return blocks
    count = -(-scores.shape[1] // block_size)
    padded = F.pad(scores, (0, count * block_size - scores.shape[1]), value=-torch.inf)
    best = padded.view(len(scores), count, block_size).amax(-1)
    newest = (visible - 1).clamp_min(0) // block_size
    best.scatter_(1, newest.unsqueeze(1), torch.inf)
    best.masked_fill_((visible == 0).unsqueeze(1), -torch.inf)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, top_positions(best, min(keep, count)), True)
    return kept & (best != -torch.inf)


def rows_of_blocks(blocks: torch.Tensor, block_size: int, rows: int) -> torch.Tensor:
    """bool [T, rows]: a mask of blocks as a mask of rows."""
    return blocks.repeat_interleave(block_size, 1)[:, :rows]


def queries_at_once(keys: int, config: ModelConfig, device: torch.device) -> int:
    """How many queries are scored together against so many keys. Torch forms the scores of every
    head, in fp32; kernels only their sums, in bf16."""
    if chunk_kernels(device) is not None:
        return max(SUMMED_ELEMENTS // keys, 1)
    return max(SCORE_ELEMENTS // (keys * config.index_n_heads), 1)


class Indexer:
    """Chooses rows for the queries of an index source layer."""

    def __init__(self, config: ModelConfig, layer: int, weights: IndexerWeights) -> None:
        self._config = config
        self._weights = weights
        self._is_candidate_source = layer == config.candidate_source_layer_id

    def choose(
        self,
        x: torch.Tensor,
        latent: torch.Tensor,
        turn: Rotation,
        keys: torch.Tensor,
        visible: torch.Tensor,
        blocks: torch.Tensor | None,
        observe: Callable[[torch.Tensor], None] | None = None,
    ) -> Choice:
        """The choice for T queries: bf16 `x` [T, D], quantized `latent`, `visible` rows [T].

        `keys` bf16 [n, index_head_dim]; `blocks` restricts the choice to earlier candidates.
        `observe` is shown the scores that enter the choice, bf16 [.., n], in pieces of queries: at
        long context all of them at once would not fit.
        """
        config = self._config
        queries, weights = index_queries(x, latent, self._weights, turn)
        size, step = config.candidate_block_size, queries_at_once(len(keys), config, x.device)
        chosen, kept = [], []
        for begin in range(0, len(x), step):
            part = slice(begin, begin + step)
            allowed = None if blocks is None or self._is_candidate_source else blocks[part]
            scores = masked_scores(queries[part], keys, weights[part], visible[part], allowed, size)
            if self._is_candidate_source:
                keep = config.candidate_topk_blocks
                kept.append(candidate_blocks(scores, visible[part], size, keep))
            if observe is not None:
                observe(scores)
            chosen.append(choose_rows(scores, min(config.index_topk, len(keys))))
        published = torch.cat(kept) if self._is_candidate_source else blocks
        return Choice(torch.cat(chosen), published)
