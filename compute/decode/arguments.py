"""The dense weights as the kernels of a decode step take them.

Owns no bytes but two copies: a layer's gate on top of the one that predicts the next layer, which
are one product, and a gated compressor's two matrices as one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compute.predictor import NO_FITTED_GATES, FittedGates, PredictingGate
from compute.weights import (
    CompressorWeights,
    EngramWeights,
    IndexerWeights,
    LayerWeights,
    MixWeights,
    ModelWeights,
    tensor_bytes,
)
from protocol.route_trace import MOE

#: uint8 e4m3 codes [N, K] and e8m0 scales [N/32, K/32] of an fp8 weight.
Stored = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class CompressorArguments:
    """`product` bf16 [kinds * head_dim, D]: kv, and the gate below it where there is one."""

    product: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexerArguments:
    """`wk` and `k_norm` are None where the layer owns no keys."""

    wq_b: Stored
    weights_proj: torch.Tensor
    wk: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class EngramArguments:
    wkv: Stored
    q_weight: torch.Tensor
    k_weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """`gates` bf16 [E, D], or [2 E, D] with the gate below it that predicts the next layer."""

    attention_mix: MixWeights
    attention_norm: torch.Tensor
    wq_a_wkv: Stored
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    wq_b: Stored
    sink: torch.Tensor
    wo_a: Stored
    wo_b: Stored
    compressor: CompressorArguments | None
    indexer: IndexerArguments | None
    ffn_mix: MixWeights
    ffn_norm: torch.Tensor
    gates: torch.Tensor
    bias: torch.Tensor
    predicting: PredictingGate | None
    shared_gate_up: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    shared_down: Stored
    engram: EngramArguments | None


@dataclass(frozen=True, slots=True)
class Arguments:
    """`embed` bf16 [V, D], `norm` fp32 [D], `head` bf16 [V, D]."""

    embed: torch.Tensor
    layers: tuple[LayerArguments, ...]
    norm: torch.Tensor
    head: torch.Tensor

    @property
    def bytes_a_token(self) -> int:
        """Bytes that a token reads: all but the embedding's other rows."""
        held = tensor_bytes((self.layers, self.norm, self.head))
        # A predicting gate's matrix is in its layer's `gates`, too, and read there.
        return held - sum(
            layer.predicting.weights.weight.nbytes for layer in self.layers if layer.predicting
        )

    @classmethod
    def of(
        cls, weights: ModelWeights, fitted: FittedGates = NO_FITTED_GATES, *, predict: bool
    ) -> Arguments:
        """From `weights` that were loaded as stored; `predict` adds the gates that predict."""
        layers = []
        for at, layer in enumerate(weights.layers):
            following = weights.layers[at + 1].gate if at + 1 < len(weights.layers) else None
            predicting = fitted.gate(MOE, 1, at + 1, following) if predict and following else None
            layers.append(_layer(layer, predicting))
        return cls(weights.embed, tuple(layers), weights.norm, weights.head)


def _layer(weights: LayerWeights, predicting: PredictingGate | None) -> LayerArguments:
    attention, gates = weights.attention, weights.gate.weight
    if predicting is not None:
        gates = torch.cat((gates, predicting.weights.weight))
    codes, scales = weights.shared.w1_w3.stored
    (gate, up), (gate_scale, up_scale) = codes.chunk(2), scales.chunk(2)
    return LayerArguments(
        attention_mix=weights.attention_mix,
        attention_norm=weights.attention_norm,
        wq_a_wkv=attention.wq_a_wkv.stored,
        q_norm=attention.q_norm,
        kv_norm=attention.kv_norm,
        wq_b=attention.wq_b.stored,
        sink=attention.sink,
        wo_a=attention.wo_a.stored,
        wo_b=attention.wo_b.stored,
        compressor=_compressor(attention.compressor),
        indexer=_indexer(attention.indexer),
        ffn_mix=weights.ffn_mix,
        ffn_norm=weights.ffn_norm,
        gates=gates,
        bias=weights.gate.bias,
        predicting=predicting,
        shared_gate_up=(gate, gate_scale, up, up_scale),
        shared_down=weights.shared.w2.stored,
        engram=_engram(weights.engram),
    )


def _compressor(weights: CompressorWeights | None) -> CompressorArguments | None:
    if weights is None:
        return None
    parts = [weights.wkv] if weights.wgate is None else [weights.wkv, weights.wgate]
    return CompressorArguments(torch.cat(parts) if len(parts) > 1 else parts[0], weights.norm)


def _indexer(weights: IndexerWeights | None) -> IndexerArguments | None:
    if weights is None:
        return None
    return IndexerArguments(weights.wq_b.stored, weights.weights_proj, weights.wk, weights.k_norm)


def _engram(weights: EngramWeights | None) -> EngramArguments | None:
    if weights is None:
        return None
    return EngramArguments(weights.wkv.stored, weights.q_weight, weights.k_weight)
