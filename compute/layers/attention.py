"""Attention over a sliding window and chosen compressed rows, in one softmax with a sink.

Owns the order of work inside an attention layer, the window ring, and the softmax's roundings. Four
layers also write compressed KV (`compressor`), some choose which rows are read (`indexer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from compute.formats import round_trip_fp8
from compute.kernels import chunk_kernels
from compute.layers.compressor import Compressor
from compute.layers.indexer import Choice, Indexer, rows_of_blocks
from compute.layers.linear import linear_fp8, linear_quantized, quantized
from compute.layers.norm import rms_norm
from compute.rope import Rope, Rotation, rotate_tail
from compute.sequence import SequenceState
from compute.weights import AttentionWeights
from protocol.config import ModelConfig

SLOTS_PER_BLOCK = 64  # the running maximum of the softmax moves on after so many slots
GATHER_ELEMENTS = 1 << 24  # key elements gathered at once, in fp32

Observer = Callable[[str, int, torch.Tensor], None]


@dataclass(slots=True)
class Chunk:
    """T tokens at consecutive positions, as all layers of one forward pass see them.

    `window` int64 [T, sliding_window]: for each query the window's positions, oldest first, as
    indices into (`before` earlier rows of the ring, then the chunk's own rows), -1 where empty.
    `choice` is the last index source's.
    """

    start: int
    positions: torch.Tensor
    plain: Rotation
    yarn: Rotation
    before: int
    window: torch.Tensor
    choice: Choice | None = None

    @classmethod
    def at(cls, start: int, count: int, config: ModelConfig, rope: Rope) -> Chunk:
        """`count` tokens from position `start`."""
        positions = torch.arange(start, start + count, device=rope.device)
        before = min(start, config.sliding_window - 1)
        window = window_slots(positions, config.sliding_window, start - before)
        return cls(start, positions, rope.plain(positions), rope.yarn(positions), before, window)


def window_slots(positions: torch.Tensor, width: int, first: int) -> torch.Tensor:
    """int64 [T, width]: positions p-width+1..p of each query p, oldest first, counted from `first`.

    A window that is not full yet ends in -1, so a slot's place in the softmax's blocks does not
    depend on how the prompt was cut into chunks.
    """
    oldest = (positions - (width - 1)).clamp_min(0).unsqueeze(1)
    slots = oldest + torch.arange(width, device=positions.device)
    return torch.where(slots <= positions.unsqueeze(1), slots - first, -1)


def sparse_attention(
    queries: torch.Tensor,
    sink: torch.Tensor,
    window: torch.Tensor,
    window_slots: torch.Tensor,
    rows: torch.Tensor | None = None,
    row_slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """bf16 [T, heads, d]: attention of each query over its own slots; keys are also the values.

    `queries` bf16 [T, heads, d], `sink` fp32 [heads]; `window` bf16 [m, d] read at `window_slots`
    [T, S] and, after those in the softmax, `rows` bf16 [n, d] at `row_slots` [T, R]; -1 is empty.
    """
    kernels = chunk_kernels(queries.device)
    if kernels is not None:
        heads: torch.Tensor = kernels.sparse_attention(
            queries, sink, window, window_slots, rows, row_slots
        )
        return heads
    slots = window_slots if row_slots is None else torch.cat((window_slots, row_slots), 1)
    step = max(GATHER_ELEMENTS // (slots.shape[1] * queries.shape[-1]), 1)
    out = torch.empty_like(queries)
    for begin in range(0, len(queries), step):
        part = slice(begin, begin + step)
        keys = window[window_slots[part].clamp_min(0)]
        if rows is not None and row_slots is not None:
            keys = torch.cat((keys, rows[row_slots[part].clamp_min(0)]), 1)
        out[part] = attend(queries[part].float(), keys.float(), slots[part] >= 0, sink)
    return out


def attend(
    queries: torch.Tensor, keys: torch.Tensor, filled: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    """[T, heads, d] of fp32 `queries` [T, heads, d], `keys` [T, S, d], bool `filled` [T, S].

    Probabilities are rounded to bf16 for the value product, relative to the maximum of the blocks
    of 64 slots seen so far; the denominator sums them unrounded. A query without a slot gives 0.
    """
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(queries.shape[-1] ** -0.5)
    scores.masked_fill_(~filled.unsqueeze(1), -torch.inf)
    highest = scores.new_full(scores.shape[:2], -torch.inf)
    total = torch.zeros_like(highest)
    summed = torch.zeros_like(queries)
    for begin in range(0, scores.shape[2], SLOTS_PER_BLOCK):
        block = scores[:, :, begin : begin + SLOTS_PER_BLOCK]
        higher = torch.maximum(highest, block.amax(-1))
        origin = higher.masked_fill(higher == -torch.inf, 0)  # nothing seen: exp(-inf - 0) is 0
        rescale = torch.exp(highest - origin)
        shares = torch.exp(block - origin.unsqueeze(-1))
        total = total * rescale + shares.sum(-1)
        rounded = shares.to(torch.bfloat16).to(shares.dtype)
        values = torch.bmm(rounded, keys[:, begin : begin + SLOTS_PER_BLOCK])
        summed = summed.mul_(rescale.unsqueeze(-1)).add_(values)
        highest = higher
    total = total + torch.exp(sink - highest)  # infinite where nothing was seen: 0 / inf is 0
    return summed.div_(total.unsqueeze(-1))


def rotate_heads(x: torch.Tensor, by: Rotation, *, inverse: bool = False) -> torch.Tensor:
    """`rotate_tail` of bf16 `x` [T, heads, d], which may be written over."""
    kernels = chunk_kernels(x.device)
    if kernels is not None:
        turned: torch.Tensor = kernels.rotate_tail(x, by, inverse=inverse)
        return turned
    return rotate_tail(x, by, inverse=inverse)


def project_out(heads: torch.Tensor, weights: AttentionWeights) -> torch.Tensor:
    """bf16 [T, D] of bf16 `heads` [T, heads, d]: each group through its own wo_a, all through wo_b.

    wo_a is stored fp8 but multiplied in bf16: its input is not quantized.
    """
    wo_a = weights.wo_a.values
    wo_a = wo_a.view(heads[0].numel() // wo_a.shape[1], -1, wo_a.shape[1])
    grouped = heads.reshape(len(heads), len(wo_a), -1).transpose(0, 1).to(wo_a.dtype)
    low_rank = torch.bmm(grouped, wo_a.transpose(1, 2)).to(torch.bfloat16)
    return linear_fp8(low_rank.transpose(0, 1).flatten(1), weights.wo_b)


class Attention:
    """Attention layer `layer`."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: AttentionWeights,
        rope: Rope,
        *,
        reference_index_keys: bool = False,
        observe: Observer | None = None,
    ) -> None:
        self._config = config
        self._layer = layer
        self._weights = weights
        self._source = config.kv_source(layer)
        self._ratio = config.compress_ratios[layer]
        self._reference_index_keys = reference_index_keys
        self._observe = observe
        self._compressor: Compressor | None = None
        self._indexer: Indexer | None = None
        if weights.indexer is not None:
            self._indexer = Indexer(config, layer, weights.indexer)
            if weights.compressor is not None:
                parts = (weights.compressor, weights.indexer, rope)
                self._compressor = Compressor(config, layer, *parts)

    def forward(self, x: torch.Tensor, chunk: Chunk, state: SequenceState) -> torch.Tensor:
        """bf16 [T, D] of normalized bf16 `x` [T, D]; writes the chunk into `state`."""
        config, weights, eps = self._config, self._weights, self._config.rms_norm_eps
        turn = chunk.plain if self._source is None else chunk.yarn
        low_rank = linear_fp8(x, weights.wq_a_wkv)
        latent = rms_norm(low_rank[:, : config.q_lora_rank], weights.q_norm, eps)
        latent = quantized(latent)
        queries = linear_quantized(latent, weights.wq_b).view(len(x), -1, config.head_dim)
        queries = rotate_heads(queries, turn)
        own = rms_norm(low_rank[:, config.q_lora_rank :], weights.kv_norm, eps)
        own = round_trip_fp8(rotate_tail(own, turn))
        window = self._enter_window(own, chunk, state.windows[self._layer])
        rows = self._compressed(x, latent, turn, chunk, state)
        if rows is None or chunk.choice is None:
            heads = sparse_attention(queries, weights.sink, window, chunk.window)
        else:
            chosen = (rows, chunk.choice.rows)
            heads = sparse_attention(queries, weights.sink, window, chunk.window, *chosen)
        return project_out(rotate_heads(heads, turn, inverse=True), weights)

    def _enter_window(self, own: torch.Tensor, chunk: Chunk, ring: torch.Tensor) -> torch.Tensor:
        """Earlier window rows and the chunk's, by position; then the newest enter the ring."""
        width = len(ring)
        earlier = torch.arange(chunk.start - chunk.before, chunk.start, device=ring.device)
        window = torch.cat((ring[earlier % width], own))
        ring[chunk.positions[-width:] % width] = own[-width:]
        return window

    def _compressed(
        self,
        x: torch.Tensor,
        latent: torch.Tensor,
        turn: Rotation,
        chunk: Chunk,
        state: SequenceState,
    ) -> torch.Tensor | None:
        """The compressed rows this layer reads, None while there are none; may publish a choice."""
        if self._source is None:
            return None
        if self._compressor is not None:
            new = self._compressor.extend(x, chunk.start, state)
            if self._observe is not None:
                self._observe("latent", self._layer, new)
            chunk.choice = None
        rows = state.compressed[self._source].rows
        if len(rows) == 0:
            return None
        if self._indexer is not None:
            self._choose(self._indexer, x, latent, turn, chunk, state)
        return rows

    def _choose(
        self,
        indexer: Indexer,
        x: torch.Tensor,
        latent: torch.Tensor,
        turn: Rotation,
        chunk: Chunk,
        state: SequenceState,
    ) -> None:
        assert self._source is not None
        source = self._source
        count = len(state.index_keys[source])
        if self._reference_index_keys and state.last_key_source is not None:
            source = state.last_key_source
        keys = state.index_keys[source].rows[:count]
        visible = (chunk.positions + 1) // self._ratio
        blocks = chunk.choice.blocks if chunk.choice is not None else None
        observe = self._observe
        show = None if observe is None else lambda s: observe("index_score", self._layer, s)
        chunk.choice = indexer.choose(x, latent, turn, keys, visible, blocks, show)
        if observe is not None:
            observe("topk_idxs", self._layer, chunk.choice.rows)
            if chunk.choice.blocks is not None:
                size = self._config.candidate_block_size
                mask = rows_of_blocks(chunk.choice.blocks, size, count)
                observe("candidates", self._layer, mask)
