"""The text forward pass: any number of tokens at any start position, layer by layer.

Owns the order of sublayers and what each asks of the expert and engram sources. Promises that the
arithmetic depends on the tokens, the state and how they are cut into chunks alone, never on what
was cached, predicted, or in which order experts arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from compute.layers import head, hyper_connections
from compute.layers.attention import Attention, Chunk, Observer
from compute.layers.engram import engram_add, engram_key_value, engram_rows
from compute.layers.hyper_connections import Mixes, collapse_norm, first_mix, write_back
from compute.layers.linear import quantized
from compute.layers.moe import (
    Routing,
    fetch,
    pick_counts,
    route,
    routed_experts,
    shared_expert,
)
from compute.predictor import NO_FITTED_GATES, FittedGates, before_attention, predict
from compute.rope import Rope
from compute.route_recorder import RouteRecorder
from compute.sequence import SequenceState
from compute.sources import EngramSource, ExpertSource, NullTracer, Tracer
from compute.weights import MixWeights, ModelWeights
from protocol.config import ModelConfig
from protocol.errors import UsageError
from protocol.route_trace import MOE, STREAM

if TYPE_CHECKING:
    # Triton, which its kernels are written in, need not be there where no GPU is.
    from compute.decode.assembly import AnyDecoder


class _LayerHint(NamedTuple):
    """What `ExpertSource.hint` takes."""

    layer: int
    picks: list[int]
    predicted_layer: int | None
    predicted: list[int]
    scores: list[float]


class Model:
    """A DeepSeek-V4.1 text model over dense `weights` and two sources of what does not fit.

    `observe(name, layer, tensor)` is shown intermediate results under the names of the golden data
    (tests/golden/data/README.md). `reference_index_keys` scores a filling group's query against the
    index keys published last, as DeepSeek's own code does, instead of the layer's own source's.
    `predictions` is how many experts of a later layer are named for each token (None: as many as it
    picks), of each of the next `ahead` layers: the next one's before this layer's experts are asked
    for, farther ones' after, so that no miss waits for them. `early` names a layer's own once more
    before its attention, in a pass over few tokens. `routes` is shown every pass where a route
    trace is wanted. `fitted` gates name them where there are some, else the layers' own do. A pass
    over a single token goes through `decoder`, if there is one. A new state has room for `capacity`
    tokens before anything of it moves.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        experts: ExpertSource,
        engram: EngramSource,
        *,
        tracer: Tracer | None = None,
        observe: Observer | None = None,
        reference_index_keys: bool = False,
        predictions: int | None = None,
        ahead: int = 1,
        early: bool = False,
        routes: RouteRecorder | None = None,
        fitted: FittedGates = NO_FITTED_GATES,
        decoder: AnyDecoder | None = None,
        capacity: int = 0,
    ) -> None:
        self.config = config
        self.device = weights.embed.device
        self._weights = weights
        self._experts = experts
        self._engram = engram
        self._tracer: Tracer = tracer or NullTracer()
        self._observe = observe
        self._routes = routes
        self._fitted = fitted
        self._decoder = decoder
        self._capacity = capacity
        self._predictions = config.num_experts_per_tok if predictions is None else predictions
        self._ahead = ahead if self._predictions else 0
        self._early = early and self._predictions > 0
        # The last layer routed, and its picks.
        self._routed: tuple[int, list[int]] = (-1, [])
        self._rope = Rope(config, self.device)
        self._attention = [
            Attention(
                config,
                layer,
                of.attention,
                self._rope,
                reference_index_keys=reference_index_keys,
                observe=observe,
            )
            for layer, of in enumerate(weights.layers)
        ]

    def new_state(self) -> SequenceState:
        """The state of a sequence without tokens."""
        return SequenceState(self.config, self.device, self._capacity)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int] | torch.Tensor,
        state: SequenceState,
        engram_ticket: int,
        *,
        want_all_logits: bool = False,
    ) -> torch.Tensor:
        """Run `tokens` [T] at positions state.length, ... and advance `state`.

        `engram_ticket` comes from the engram source's `request` for these tokens; it is done with
        when this returns or raises. Returns fp32 logits [V] of the last token, or [T, V]. Raises
        UsageError for tokens that cannot be run (the state stays as it was), and ReadError or
        StallError from the sources (the state is unusable until it is restored).
        """
        try:
            ids = self._checked(tokens, state)
            state.usable = False
            if self._decoder is not None and len(ids) == 1:
                logits = self._decoder.forward(int(ids), state, engram_ticket).unsqueeze(0)
            else:
                streams, pre = self._run(ids, state, engram_ticket)
                if not want_all_logits:
                    streams, pre = streams[-1:], pre[-1:]
                logits = self.head(streams, pre)
                state.length += len(ids)
            state.usable = True
        finally:
            self._engram.done(engram_ticket)
        return logits if want_all_logits else logits[0]

    def _checked(self, tokens: Sequence[int] | torch.Tensor, state: SequenceState) -> torch.Tensor:
        """`tokens` as int64 [T] on the CPU."""
        if not state.usable:
            raise UsageError("the sequence's last pass failed midway; start it again")
        ids = torch.as_tensor(tokens, dtype=torch.int64, device="cpu").flatten()
        if len(ids) == 0:
            raise UsageError("no tokens to run; a prompt needs at least one")
        bad = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if len(bad):
            raise UsageError(
                f"token id {int(bad[0])} is outside the vocabulary of {self.config.vocab_size}"
            )
        limit = self.config.max_position_embeddings
        if state.length + len(ids) > limit:
            raise UsageError(
                f"{state.length + len(ids)} tokens are more than the model's limit of {limit}"
            )
        return ids

    def _run(
        self, ids: torch.Tensor, state: SequenceState, ticket: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        chunk = self.chunk(state.length, len(ids))
        embedded = self._weights.embed[ids.to(self.device)]
        streams = embedded.unsqueeze(1).repeat(1, config.hc_mult, 1)
        pre = first_mix(len(ids), config.hc_mult, self.device)
        if self._routes is not None:
            self._routes.begin(state.length, len(ids))
        for layer in range(config.num_hidden_layers):
            if layer in config.engram_layer_ids:
                with self._tracer.span("engram", layer=layer):
                    index = config.engram_layer_ids.index(layer)
                    codes, scales = self._engram.rows(ticket, index)
                    streams = self.add_engram(layer, streams, codes, scales)
            streams, pre = self.block(layer, streams, pre, chunk, state)
        if self._routes is not None:
            self._routes.end()
        return streams, pre

    def chunk(self, start: int, count: int) -> Chunk:
        """What the layers of a pass over `count` tokens at `start` share."""
        return Chunk.at(start, count, self.config, self._rope)

    def add_engram(
        self, layer: int, streams: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """`streams` bf16 [T, hc, D] with the engram's gated value; rows as `EngramSource` gives."""
        weights = self._weights.layers[layer].engram
        assert weights is not None
        rows = engram_rows(codes.to(self.device), scales.to(self.device))
        key_value = engram_key_value(rows, weights)
        self._show("engram_rows", layer, rows)
        self._show("engram_kv", layer, key_value)
        return engram_add(streams, key_value, weights, self.config.rms_norm_eps)

    def block(
        self,
        layer: int,
        streams: torch.Tensor,
        pre: torch.Tensor,
        chunk: Chunk,
        state: SequenceState,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer: bf16 `streams` [T, hc, D] and mix `pre` fp32 [T, hc] to those of the next."""
        weights, eps = self._weights.layers[layer], self.config.rms_norm_eps
        self._show("stream_in", layer, streams)
        with self._tracer.span("attention", layer=layer):
            mixes = self._mixes(streams, weights.attention_mix)
            if self._routes is not None:
                self._routes.entered(layer, streams, mixes)
            self._foretell(layer, streams, mixes)
            x = collapse_norm(streams, pre, weights.attention_norm, eps)
            y = self.attention(layer, x, chunk, state)
            streams = write_back(y, streams, mixes)
        with self._tracer.span("routing", layer=layer):
            ffn_mixes = self._mixes(streams, weights.ffn_mix)
            x = collapse_norm(streams, mixes.pre, weights.ffn_norm, eps)
            routing, counts, farther = self._route(layer, x)
        if self._routes is not None:
            self._routes.routed(layer, x, routing)
        with self._tracer.span("experts", layer=layer):
            y = self._experts_product(layer, x, routing, counts, farther)
            streams = write_back(y, streams, ffn_mixes)
        if self._routes is not None:
            self._routes.left(layer)
        self._show("stream_out", layer, streams)
        self._show("pre_mix", layer, ffn_mixes.pre)
        return streams, ffn_mixes.pre

    def attention(
        self, layer: int, x: torch.Tensor, chunk: Chunk, state: SequenceState
    ) -> torch.Tensor:
        """bf16 [T, D] of normalized bf16 `x` [T, D]."""
        y = self._attention[layer].forward(x, chunk, state)
        self._show("attn_in", layer, x)
        self._show("attn_out", layer, y)
        return y

    def experts(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """bf16 [T, D]: routed and shared experts of normalized bf16 `x` [T, D]."""
        return self._experts_product(layer, x, *self._route(layer, x))

    def head(self, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """fp32 logits [T, V]."""
        eps = self.config.rms_norm_eps
        return head.logits(streams, pre, self._weights.norm, self._weights.head, eps)

    def _mixes(self, streams: torch.Tensor, weights: MixWeights) -> Mixes:
        config = self.config
        eps = (config.rms_norm_eps, config.hc_eps)
        return hyper_connections.mixes(streams, weights, *eps, config.hc_sinkhorn_iters)

    def _foretell(self, layer: int, streams: torch.Tensor, mixes: Mixes) -> None:
        """Name `layer`'s likely experts by all that is known before its attention, whose time their
        reads then have. The layer before has named them too, knowing less."""
        config, weights = self.config, self._weights.layers[layer]
        k, (before, picks) = config.num_experts_per_tok, self._routed
        # Where a layer may pick every expert there is nothing to foretell; nor has anybody routed
        # before the first.
        few = len(streams) * k < config.n_routed_experts
        if not (self._early and few and layer and before == layer - 1):
            return
        x = before_attention(streams, mixes, weights.ffn_norm, config.rms_norm_eps)
        gate = self._fitted.gate(STREAM, 1, layer, weights.gate)
        said = predict(x, gate.weights, k, self._predictions * len(x))
        scores = [gate.scores(margin) for margin in said.margins.tolist()]
        self._experts.hint(before, picks, layer, said.experts.tolist(), scores)

    def _route(self, layer: int, x: torch.Tensor) -> tuple[Routing, list[int], list[_LayerHint]]:
        """Choose `layer`'s experts and name later layers' likely ones, in one read-back; publish
        the next layer's, and return those to be published of farther ones.

        Of the picks only how many tokens picked each expert comes to the host."""
        config, layers = self.config, self._weights.layers
        k = config.num_experts_per_tok
        routing = route(x, layers[layer].gate, k, config.routed_scaling_factor)
        self._show("gate_indices", layer, routing.picks)
        self._show("gate_weights", layer, routing.weights)
        parts = [pick_counts(routing, config.n_routed_experts).double()]
        following = range(layer + 1, min(layer + 1 + self._ahead, len(layers)))
        for target in following:
            gate = self._fitted.gate(MOE, target - layer, target, layers[target].gate)
            said = predict(x, gate.weights, k, self._predictions * len(x))
            parts += (said.experts.double(), gate.scores(said.margins).double())
        # One transfer, so one wait for the device a layer; integers are exact in float64.
        values = torch.cat(parts).tolist()
        counts = [int(value) for value in values[: config.n_routed_experts]]
        chosen, at, hints = _picked(counts), len(counts), []
        for target, said_experts in zip(following, parts[1::2], strict=True):
            middle = at + len(said_experts)
            end = middle + len(said_experts)
            predicted = [int(value) for value in values[at:middle]]
            hints.append(_LayerHint(layer, chosen, target, predicted, values[middle:end]))
            at = end
        nearest, *farther = hints or [_LayerHint(layer, chosen, None, [], [])]
        self._experts.hint(*nearest)
        self._routed = layer, chosen
        return routing, counts, farther

    def _experts_product(
        self,
        layer: int,
        x: torch.Tensor,
        routing: Routing,
        counts: list[int],
        farther: Sequence[_LayerHint],
    ) -> torch.Tensor:
        limit = self.config.swiglu_limit
        try:
            arriving = fetch(self._experts, layer, _picked(counts), self.device)
            for hint in farther:
                self._experts.hint(*hint)
            # The shared expert is computed while what is missing lands.
            operand = quantized(x)
            shared = shared_expert(operand, self._weights.layers[layer].shared, limit)
            routed = routed_experts(operand, routing, counts, arriving, self.config)
        finally:
            self._experts.release()
        y = routed.add_(shared).to(torch.bfloat16)
        self._show("ffn_in", layer, x)
        self._show("ffn_out", layer, y)
        return y

    def _show(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        if self._observe is not None:
            self._observe(name, layer, tensor)


def _picked(counts: Sequence[int]) -> list[int]:
    """The experts that any token picked, by how many did."""
    return [expert for expert, count in enumerate(counts) if count]
