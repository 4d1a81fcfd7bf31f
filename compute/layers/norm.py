"""Root-mean-square normalization."""

from __future__ import annotations

import torch

from compute.formats import scalar


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """bf16(weight * x / sqrt(mean(x^2) + eps)) over the last axis, fp32 inside.

    `x` bf16 or fp32 [..., D], `weight` fp32 [D]. `eps` may be 1e-20, which only fp32 can hold.
    """
    x = x.float()
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(scalar(eps)))
    return (x * inverse).mul_(weight).to(torch.bfloat16)
