"""The engram layer: rows looked up by n-gram add a gated value to every residual stream."""

from __future__ import annotations

import torch

from compute.formats import dequantize_engram_rows
from compute.layers.linear import linear_fp8
from compute.weights import EngramWeights


def engram_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 [T, rows * head_dim]: a token's rows side by side, dequantized.

    `codes` uint8 [T, rows, head_dim] (e4m3), `scales` uint8 [T, rows, head_dim / 32] (e8m0).
    """
    return dequantize_engram_rows(codes, scales).flatten(1)


def engram_key_value(rows: torch.Tensor, weights: EngramWeights) -> torch.Tensor:
    """bf16 [T, (hc + 1) * D]: a key for every stream, then the one value."""
    return linear_fp8(rows, weights.wkv)


def engram_add(
    streams: torch.Tensor, key_value: torch.Tensor, weights: EngramWeights, eps: float
) -> torch.Tensor:
    """bf16 [T, hc, D]: stream i plus gate_i times the value, fp32 inside.

    d_i = sum(S_i q_i k_i K_i) rsqrt(mean(S_i^2) + eps) rsqrt(mean(K_i^2) + eps) D^-0.5;
    gate_i = sigmoid(sign(d_i) sqrt(max(|d_i|, 1e-6))).
    """
    hc, width = streams.shape[1:]
    key = key_value[:, : hc * width].view(-1, hc, width).float()
    value = key_value[:, None, hc * width :].float()
    query = streams.float()
    agreement = (query * (weights.q_weight * weights.k_weight) * key).sum(-1)
    agreement *= torch.rsqrt(query.square().mean(-1) + eps)
    agreement *= torch.rsqrt(key.square().mean(-1) + eps) * width**-0.5
    gate = torch.sigmoid(agreement.sign() * agreement.abs().clamp_min(1e-6).sqrt())
    return query.addcmul_(gate.unsqueeze(-1), value).to(torch.bfloat16)
