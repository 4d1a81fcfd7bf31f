"""The launches of one token, in order: what the model computes, through the kernels.

Owns the order and which buffers meet which weights. Reads nothing back and depends on nothing that
changes from token to token but what lies in the buffers, so any run of calls between two that need
the host may be captured. `compute.model` computes the same with torch operations.

A token is `begin`, then for every layer `engram` where there is one, `attention`, `route` and, once
the picks' addresses are in `buffers.table`, `experts`; then `head`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch

from compute.decode.arguments import (
    Arguments,
    CompressorArguments,
    IndexerArguments,
    LayerArguments,
)
from compute.decode.buffers import Buffers, Mix
from compute.device_experts import DeviceSlots
from compute.formats import dequantize_engram_rows
from compute.kernels import kernels_for
from compute.kernels.router import Lookup, Prediction
from compute.rope import frequencies
from compute.sequence import SequenceState
from compute.weights import MixWeights
from protocol.config import ModelConfig


class DecodeStep:
    """The kernels of one token over `arguments`, writing `buffers` and the bound state.

    `predictions` experts of the next layer are named. `reference_index_keys` as in `Model`.
    """

    def __init__(
        self,
        config: ModelConfig,
        arguments: Arguments,
        *,
        predictions: int,
        reference_index_keys: bool = False,
        kernels: ModuleType | None = None,
    ) -> None:
        device = arguments.embed.device
        self.config = config
        self.buffers = Buffers(config, device, predictions)
        self.arguments = arguments
        self._predictions = predictions
        self._reference_index_keys = reference_index_keys
        self._k = kernels or kernels_for(device)
        dim = config.qk_rope_head_dim
        yarn = frequencies(dim, config.compress_rope_theta, config.rope_scaling)
        self._plain = frequencies(dim, config.rope_theta, None).to(device)
        self._yarn = yarn.to(device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._restricted = _restricted_layers(config)
        self._state: SequenceState | None = None
        self._key_source: int | None = None
        self._baked: tuple[object, ...] = ()

    @property
    def state(self) -> SequenceState:
        """The bound sequence."""
        assert self._state is not None
        return self._state

    def bind(self, state: SequenceState) -> None:
        """The next token is `state`'s: see that it has room, before anything is launched."""
        state.make_room()
        self.buffers.fit(state)
        self._state = state
        self._key_source = state.last_key_source
        # Once a token, not once a segment: nothing moves in between. The same object while nothing
        # has moved, which is compared faster.
        baked = self._addresses()
        if baked != self._baked:
            self._baked = baked

    def baked(self) -> tuple[object, ...]:
        """All that a captured launch has baked in and that may change between tokens."""
        return self._baked

    def _addresses(self) -> tuple[object, ...]:
        state, b = self.state, self.buffers
        keys = [state.last_key_source, state.length % 2] if self._reference_index_keys else []
        return (
            state.windows.data_ptr(),
            b.scores.data_ptr(),
            *(part.data_ptr() for part in state.filling.values()),
            *(
                (rows.room(0).data_ptr(), rows.capacity)
                for held in (state.compressed, state.index_keys)
                for rows in held.values()
            ),
            *keys,
        )

    def written(self) -> dict[str, torch.Tensor]:
        """All that a token writes, by name: buffers, and of the state what is not only appended."""
        state = self.state
        tensors = self.buffers.tensors()
        tensors["windows"] = state.windows
        for layer, filling in state.filling.items():
            tensors[f"filling.{layer}"] = filling
            for name, rows in (("row", state.compressed[layer]), ("key", state.index_keys[layer])):
                tensors[f"{name}.{layer}"] = rows.room(1)[len(rows) : len(rows) + 1]
        return tensors

    def scores(self, layer: int, margins: Sequence[float]) -> list[float]:
        """What `layer`'s prediction says of `margins`; see `PredictingGate.scores`."""
        predicting = self.arguments.layers[layer].predicting
        assert predicting is not None
        return [predicting.scores(margin) for margin in margins]

    # --- the token's stages -----------------------------------------------------------------------

    def begin(self) -> None:
        """From `token` and `position` to the streams and what depends on the position alone."""
        b = self.buffers
        self._k.begin_token(
            b.token, b.position, self.arguments.embed, self._plain, self._yarn, b.ratio_values,
            b.streams, b.collapsed, b.mixes[1].pre, b.cos, b.sin, b.slot, b.window_index, b.visible,
        )  # fmt: skip

    def engram(self, layer: int) -> None:
        """Add the rows in `engram_codes` and `engram_scales` to the streams."""
        b, weights = self.buffers, self.arguments.layers[layer].engram
        assert weights is not None
        at = self.config.engram_layer_ids.index(layer)
        rows = dequantize_engram_rows(b.engram_codes[at], b.engram_scales[at]).flatten(1)
        self._k.quantize(rows, b.engram_rounded)
        self._k.fp8_matvec(b.engram_rounded, *weights.wkv, b.key_value)
        self._k.engram_add(
            b.streams, b.key_value, weights.q_weight, weights.k_weight, b.mixes[1].pre,
            b.collapsed, eps=self.config.rms_norm_eps,
        )  # fmt: skip

    def attention(self, layer: int) -> None:
        """Attention of `layer` with all that it writes into the state, back into the streams."""
        b, k, config = self.buffers, self._k, self.config
        weights, mix = self.arguments.layers[layer], b.mixes[0]
        with self.beside():
            self._mix(weights.attention_mix, mix)
        indexed = weights.indexer is not None
        k.normed_fp8_matvec(
            b.collapsed, weights.attention_norm, *weights.wq_a_wkv, b.down,
            b.x if indexed else None, eps=config.rms_norm_eps,
        )  # fmt: skip
        turn = slice(0, 1) if config.compress_ratios[layer] == 0 else slice(1, 2)
        cos, sin = b.cos[turn], b.sin[turn]
        window = self.state.windows[layer]
        k.finish_query_kv(
            b.down, weights.q_norm, weights.kv_norm, cos, sin, b.slot, b.latent, window,
            eps=config.rms_norm_eps,
        )  # fmt: skip
        k.fp8_matvec(b.latent, *weights.wq_b, b.query.view(1, -1))
        if weights.indexer is not None:
            self._choose(layer, weights.compressor, weights.indexer, cos, sin)
        source = config.kv_source(layer)
        rows = window if source is None else self.state.compressed[source].room(0)
        chosen = b.no_choice if source is None else b.chosen
        k.attend(
            b.query, cos, sin, window, b.window_index, rows, chosen, weights.sink, b.attended,
            b.attention,
        )  # fmt: skip
        k.fp8_matvec(
            b.attended.view(1, -1), *weights.wo_a, b.grouped,
            groups=config.o_groups, round_trip=True,
        )  # fmt: skip
        self.join()
        k.fp8_matvec_to_streams(
            b.grouped, *weights.wo_b, b.streams, mix.post, mix.comb, mix.pre, b.collapsed
        )

    def route(self, layer: int, slots: DeviceSlots | None) -> None:
        """The experts' input, `routed`, `weights` and, of picks that have one of `slots`, the
        addresses in `table`; and beside them, until `join`, the shared expert."""
        b, k, config = self.buffers, self._k, self.config
        weights = self.arguments.layers[layer]
        experts, shares = config.n_routed_experts, b.gate_logits.shape[0]
        width = len(weights.gates)
        logits = b.gate_logits.view(-1)[: shares * width].view(shares, 1, width)
        k.normed_bf16_matvec(
            b.collapsed, weights.ffn_norm, weights.gates, logits, b.rounded, b.x_limbs,
            eps=config.rms_norm_eps,
        )  # fmt: skip
        with self.beside():
            self._shared_expert(weights)
            self._mix(weights.ffn_mix, b.mixes[1])
        prediction = lookup = None
        if slots is not None:
            lookup = Lookup(slots.of[layer], slots.first, b.table, slots.slot_bytes)
        if weights.predicting is not None:
            bias = weights.predicting.weights.bias
            prediction = Prediction(logits[:, :, experts:], bias, b.predicted, b.margins)
        k.route(
            logits[:, :, :experts], weights.bias, b.ids, b.weights, prediction, lookup,
            scaling=config.routed_scaling_factor,
        )  # fmt: skip

    def tell(self, layer: int, slots: torch.Tensor, record: torch.Tensor) -> None:
        """Tell the host in `record` what `layer` has routed, and which of it has no slot in `slots`
        int32 [layers, experts]."""
        b, picks = self.buffers, self.config.num_experts_per_tok
        self._k.tell(b.routed, b.tag, slots[layer], record, layer=layer, picks=picks)

    def experts(self, layer: int, *, joined: bool) -> None:
        """The picks whose addresses are in `table`, with the shared expert, into the streams.
        `joined` says that `join` has been called since `route`."""
        b, k, mix = self.buffers, self._k, self.buffers.mixes[1]
        limit = self.config.swiglu_limit
        k.experts_gate_up(b.x_limbs, b.table, b.weights, b.inner, limit=limit)
        k.quantize(b.inner, None, b.inner_limbs)
        k.experts_down(b.inner_limbs, b.table, b.outputs)
        if not joined:
            self.join()
        k.post(b.outputs, b.shared, b.streams, mix.post, mix.comb, mix.pre, b.collapsed)

    def head(self) -> None:
        """fp32 `logits` of what leaves the last layer."""
        b = self.buffers
        eps = self.config.rms_norm_eps
        self._k.rms_norm(b.collapsed, self.arguments.norm, b.x, None, eps=eps)
        self._k.bf16_matvec(b.x, self.arguments.head, b.logits)

    # --- parts of them ----------------------------------------------------------------------------

    def _choose(
        self,
        layer: int,
        compressor: CompressorArguments | None,
        indexer: IndexerArguments,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """Into `chosen`: the compressed rows that this layer and those after it read."""
        b, k, config, state = self.buffers, self._k, self.config, self.state
        source = config.kv_source(layer)
        assert source is not None
        at = b.ratios.index(config.compress_ratios[layer])
        visible = b.visible[at : at + 1]
        if compressor is not None:
            self._compress(layer, compressor, indexer, at)
        k.fp8_matvec(b.latent, *indexer.wq_b, b.raw_index_query.view(1, -1))
        k.bf16_matvec(b.x, indexer.weights_proj, b.raw_index_weights)
        k.index_queries(
            b.raw_index_query, b.raw_index_weights, cos, sin, b.index_query, b.index_weights
        )
        if self._reference_index_keys and self._key_source is not None:
            source = self._key_source
        keys = state.index_keys[source].room(0)
        scores = b.scores[:, : len(keys)]
        blocks = b.blocks[:, : -(-len(keys) // b.block_size)]
        k.index_scores(
            b.index_query, b.index_weights, keys, visible,
            blocks if layer in self._restricted else None, scores, block_size=b.block_size,
        )  # fmt: skip
        if layer == config.candidate_source_layer_id:
            k.choose_blocks(
                scores, visible, blocks,
                block_size=b.block_size, keep=config.candidate_topk_blocks,
            )  # fmt: skip
        k.choose_rows(scores, visible, b.chosen)

    def _compress(
        self, layer: int, weights: CompressorArguments, indexer: IndexerArguments, at: int
    ) -> None:
        """Take the token into its group; where it fills the group, write the row and its key."""
        b, k, config, state = self.buffers, self._k, self.config, self.state
        assert indexer.wk is not None and indexer.k_norm is not None
        ratio, eps = b.ratios[at], config.rms_norm_eps
        splits, width = b.shares.shape[0], len(weights.product)
        shares = b.shares.view(-1)[: splits * width].view(splits, 1, width)
        cos, sin = b.cos[2 + at : 3 + at], b.sin[2 + at : 3 + at]
        k.bf16_matvec(b.x, weights.product, shares)
        k.compress_step(
            shares, weights.norm, cos, sin, b.position, state.filling[layer], b.row_latent,
            state.compressed[layer].room(0), ratio=ratio, eps=eps,
        )  # fmt: skip
        k.bf16_matvec(b.row_latent, indexer.wk, b.key_shares)
        k.index_key_step(
            b.key_shares, indexer.k_norm, cos, sin, b.position,
            state.index_keys[layer].room(0), ratio=ratio, eps=eps,
        )  # fmt: skip
        if (state.length + 1) % ratio == 0:
            self._key_source = layer

    def _mix(self, weights: MixWeights, mix: Mix) -> None:
        b, config = self.buffers, self.config
        self._k.mix_dot(b.streams, weights.fn, b.mix_sums)
        self._k.mix_finish(
            b.mix_sums, weights.scale, weights.base, mix.pre, mix.post, mix.comb,
            width=config.hc_mult * config.hidden_size, iterations=config.hc_sinkhorn_iters,
            norm_eps=config.rms_norm_eps, eps=config.hc_eps,
        )  # fmt: skip

    def _shared_expert(self, weights: LayerArguments) -> None:
        b = self.buffers
        self._k.fp8_gate_up(
            b.rounded, *weights.shared_gate_up, b.shared_inner, limit=self.config.swiglu_limit
        )
        self._k.fp8_matvec(b.shared_inner, *weights.shared_down, b.shared)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch on a second stream what the critical path does not wait for until `join`."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """Let what is launched next wait for all that was launched `beside`."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)


def _restricted_layers(config: ModelConfig) -> set[int]:
    """Index sources that may only choose within the candidate blocks: those behind the candidate
    source, up to the next layer that compresses anew."""
    restricted, blocks = set(), False
    for layer in range(config.num_hidden_layers):
        if layer in config.kv_source_layer_ids:
            blocks = False
        if layer == config.candidate_source_layer_id:
            blocks = True
        elif blocks and layer in config.index_source_layer_ids:
            restricted.add(layer)
    return restricted
