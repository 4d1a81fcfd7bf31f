"""The head: logits from the streams that leave the last layer."""

from __future__ import annotations

import torch

from compute.layers.hyper_connections import collapse_norm
from compute.layers.linear import linear_fp32


def logits(
    streams: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor, head: torch.Tensor, eps: float
) -> torch.Tensor:
    """fp32 [T, V] of bf16 `streams` [T, hc, D] and the last mix `pre` fp32 [T, hc].

    There is no learned collapse: the mix that the last layer handed on is used. `head` [V, D].
    """
    return linear_fp32(collapse_norm(streams, pre, norm, eps), head)
