"""Which experts a later layer will likely want: its gate, applied to what is known earlier."""

from __future__ import annotations

from typing import NamedTuple

import torch

from compute.layers.hyper_connections import Mixes, collapse, write_back
from compute.layers.moe import gate_scores
from compute.layers.norm import rms_norm
from compute.weights import GateWeights


class Prediction(NamedTuple):
    """int64 `experts` [n], best first, and fp32 `margins` [n] above (or below) the cut at top-k."""

    experts: torch.Tensor
    margins: torch.Tensor


def predict(x: torch.Tensor, gate: GateWeights, top_k: int, count: int) -> Prediction:
    """The `count` experts that `gate` puts highest for any token of bf16 `x` [T, D].

    An expert's margin is its biased score less the token's `top_k`-th best, at the token where that
    is largest: with this input the gate would pick exactly the experts whose margin is 0 or more.
    """
    biased = gate_scores(x, gate).add_(gate.bias)
    cut = biased.topk(top_k, -1).values[:, -1:]
    best = (biased - cut).amax(0).topk(min(count, biased.shape[1]))
    return Prediction(best.indices, best.values)


def before_attention(
    streams: torch.Tensor, mixes: Mixes, ffn_norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """bf16 [T, D]: a layer's MoE input if its attention added nothing to `streams` [T, hc, D].

    `mixes` are its attention's, made from the same streams. How the streams are carried over and
    collapsed is exact; only the attention's own output is missing.
    """
    nothing = streams.new_zeros(streams.shape[0], streams.shape[2])
    return rms_norm(collapse(write_back(nothing, streams, mixes), mixes.pre), ffn_norm, eps)
