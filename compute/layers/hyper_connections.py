"""The residual highway: hc parallel streams, mixed before and after every sublayer.

Each sublayer makes three mixes from the streams: `pre` collapses them for the NEXT sublayer,
`post` and `comb` write the sublayer's output back. The model collapses one sublayer late.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from compute.formats import scalar
from compute.kernels import chunk_kernels
from compute.layers.norm import rms_norm
from compute.weights import MixWeights


class Mixes(NamedTuple):
    """fp32 `pre` [T, hc], `post` [T, hc], `comb` [T, hc, hc] (from stream, to stream)."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def first_mix(tokens: int, hc: int, device: torch.device) -> torch.Tensor:
    """fp32 [T, hc]: the collapse before the first sublayer takes stream 0."""
    mix = torch.zeros(tokens, hc, device=device)
    mix[:, 0] = 1
    return mix


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """bf16 [T, D] = sum over streams of `pre` [T, hc] times bf16 `streams` [T, hc, D]."""
    return (streams.float() * pre.unsqueeze(-1)).sum(1).to(torch.bfloat16)


def collapse_norm(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """bf16 [T, D]: what a sublayer reads of `streams`, the `rms_norm` of their `collapse`."""
    kernels = chunk_kernels(streams.device)
    if kernels is not None:
        read: torch.Tensor = kernels.collapse_norm(streams, pre, weight, eps)
        return read
    return rms_norm(collapse(streams, pre), weight, eps)


def mixes(
    streams: torch.Tensor, weights: MixWeights, norm_eps: float, hc_eps: float, iterations: int
) -> Mixes:
    """The mixes a sublayer makes from bf16 `streams` [T, hc, D], in fp32."""
    kernels = chunk_kernels(streams.device)
    if kernels is not None:
        made: Mixes = kernels.mixes(streams, weights, norm_eps, hc_eps, iterations)
        return made
    flat = streams.float().flatten(1)
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True).add_(scalar(norm_eps)))
    raw = F.linear(flat, weights.fn).mul_(inverse)
    return split_mixes(raw, weights.scale, weights.base, hc_eps, iterations)


def split_mixes(
    raw: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float, iterations: int
) -> Mixes:
    """Turn fp32 `raw` [T, (2 + hc) * hc] into mixes; `comb` is made doubly stochastic (Sinkhorn).

    pre = sigmoid(. * scale0 + base) + eps, post = 2 sigmoid(. * scale1 + base), comb = softmax
    over the target stream of (. * scale2 + base) plus eps, then columns normalized, then
    `iterations` - 1 times rows and columns; every divisor is a sum plus eps.
    """
    hc = int((1 + raw.shape[-1]) ** 0.5) - 1
    pre_raw, post_raw, comb_raw = raw.split((hc, hc, hc * hc), -1)
    pre_base, post_base, comb_base = base.split((hc, hc, hc * hc))
    pre = (pre_raw * scale[0] + pre_base).sigmoid_().add_(eps)
    post = (post_raw * scale[1] + post_base).sigmoid_().mul_(2)
    comb = (comb_raw * scale[2] + comb_base).view(-1, hc, hc).softmax(-1).add_(eps)
    # A product with ones that starts from eps is a sum plus eps in one operation, not two.
    start, ones = comb.new_full((1, 1, 1), eps), comb.new_ones(len(comb), 1, hc)
    column_start, row_start = start.expand(len(comb), 1, hc), start.expand(len(comb), hc, 1)
    ones_below = ones.view(len(comb), hc, 1)
    comb.div_(torch.baddbmm(column_start, ones, comb))
    for _ in range(iterations - 1):
        comb.div_(torch.baddbmm(row_start, comb, ones_below))
        comb.div_(torch.baddbmm(column_start, ones, comb))
    return Mixes(pre, post, comb)


def write_back(output: torch.Tensor, streams: torch.Tensor, by: Mixes) -> torch.Tensor:
    """bf16 [T, hc, D]: stream j becomes post_j * output + sum_i comb_ij * stream_i, fp32 inside.

    `output` bf16 [T, D], `streams` bf16 [T, hc, D].
    """
    kernels = chunk_kernels(streams.device)
    if kernels is not None:
        written: torch.Tensor = kernels.write_back(output, streams, by)
        return written
    carried = torch.bmm(by.comb.transpose(1, 2), streams.float())
    carried.addcmul_(by.post.unsqueeze(-1), output.float().unsqueeze(1))
    return carried.to(torch.bfloat16)
