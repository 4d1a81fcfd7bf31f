"""Hyper-connections for training: the mixes of a sublayer, collapsing the streams and writing back.

T tokens, hc streams of H columns each, bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tools.train.fused import fused
from tools.train.sinkhorn import sinkhorn

Mixes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """bf16 of weight * x / sqrt(mean(x^2) + eps); the weight is used as stored, in bf16."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.to(torch.bfloat16).float() * wide * scale).to(torch.bfloat16)


def mixes(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    hc_eps: float,
    norm_eps: float,
) -> Mixes:
    """pre [T, hc], post [T, hc], and comb [T, hc, hc] before Sinkhorn, fp32, of `streams` [T, hc,
    H].

    In training on a GPU the product with `fn` is a bf16 one: a third of the memory traffic.
    """
    hc = streams.shape[1]
    flat = streams.flatten(1)
    inverse = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + norm_eps)
    product = (
        F.linear(flat, fn.to(torch.bfloat16)).float()
        if flat.is_cuda and torch.is_grad_enabled()
        else F.linear(flat.float(), fn)
    )
    m = product * inverse
    pre = torch.sigmoid(m[:, :hc] * scale[0] + base[:hc]) + hc_eps
    post = 2 * torch.sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (m[:, 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc))
    return pre, post, torch.softmax(comb, -1) + hc_eps


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """bf16 [T, H]: the streams mixed by `pre`."""
    total = torch.zeros_like(streams[:, 0], dtype=torch.float32)
    for i in range(streams.shape[1]):
        total = total + pre[:, i, None] * streams[:, i].float()
    return total.to(torch.bfloat16)


def write_back(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """bf16 streams after a sublayer: S'_j = post_j y + sum_i comb_ij S_i."""
    kept = sum(
        comb[:, i, :, None] * streams[:, i, None, :].float() for i in range(streams.shape[1])
    )
    return (post[:, :, None] * y[:, None, :].float() + kept).to(torch.bfloat16)


def enter(
    streams: torch.Tensor,
    pre: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    rounds: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sublayer's input (collapsed by the mix handed down) and its own three mixes."""
    x, own_pre, post, cells = _enter(streams, pre, fn, base, scale, norm, hc_eps, norm_eps)
    return x, own_pre, post, sinkhorn(cells, rounds, hc_eps)


@fused
def _enter(
    streams: torch.Tensor,
    pre: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    hc_eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    own_pre, post, cells = mixes(streams, fn, base, scale, hc_eps, norm_eps)
    return rms_norm(collapse(streams, pre), norm, norm_eps), own_pre, post, cells


leave = fused(write_back)
