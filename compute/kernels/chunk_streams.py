"""The residual highway for many tokens: mixes, putting an output back, and what a sublayer reads.

Owns three kernels that go over the streams once each, where torch makes fp32 copies of them. The
mixes' product has fp32 weights and bf16 streams; it runs on the tensor cores as three bf16 products
with what each rounding of the weights left over (24 bits in all), accumulated in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.dense import columns_a_split
from compute.kernels.hyper_connections import SUMS, mix_finish
from compute.kernels.numeric import PORTABLE, UNFUSED, as_bf16, to_bf16
from compute.layers.hyper_connections import Mixes
from compute.weights import MixWeights

#: Tokens one program of the mixes' product takes, and columns it takes at a time.
TOKENS = 64
COLUMNS = 128
#: Shares of the flattened streams, so that few tokens fill a GPU.
SPLITS = 4


@triton.jit
def _mix_sums(
    streams, matrix, sums, tokens, width, share,
    MIXES: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    m = tl.arange(0, SUMS)
    dots = tl.zeros((TOKENS, SUMS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    begin = tl.program_id(1) * share
    for first in range(begin, begin + share, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        inside = (k < width) & (k < begin + share)
        s = tl.load(
            streams + token[:, None].to(tl.int64) * width + k[None, :],
            mask=(token < tokens)[:, None] & inside[None, :],
            other=0.0,
        )
        f = tl.load(
            matrix + m[None, :] * width + k[:, None],
            mask=(m < MIXES)[None, :] & inside[:, None],
            other=0.0,
        )
        if PORTABLE:
            dots += tl.dot(s.to(tl.float32), f, input_precision="ieee")
        else:
            high = f.to(tl.bfloat16)
            rest = f - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            # Not summed up there: tensor cores cut off what an addition shifts out.
            dots += tl.dot(s, high, tl.dot(s, middle, tl.dot(s, low)))
        s = s.to(tl.float32)
        squares += tl.sum(s * s, axis=1)
    # The sum after the mixes is that of the squares.
    dots = tl.where((m == MIXES)[None, :], squares[:, None], dots)
    at = (tl.program_id(1) * tokens + token)[:, None] * SUMS + m[None, :]
    tl.store(sums + at, dots, mask=(token < tokens)[:, None])


@triton.jit
def _write_back(output, streams, post, comb, out, H, HC: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    y = tl.load(output + token * H + column, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(HC):
        value = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(HC):  # the cache has them after the first round
            s = tl.load(streams + (token * HC + i) * H + column, mask=inside, other=0.0)
            value += tl.load(comb + (token * HC + i) * HC + j) * s.to(tl.float32)
        value += tl.load(post + token * HC + j) * y
        tl.store(out + (token * HC + j) * H + column, as_bf16(value), mask=inside)


@triton.jit
def _collapse_norm(streams, pre, weight, out, H, eps, HC: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    x = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(HC):
        s = tl.load(streams + (token * HC + i) * H + column, mask=inside, other=0.0)
        x += s.to(tl.float32) * tl.load(pre + token * HC + i)
    x = to_bf16(x)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=0) / H + eps))
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, as_bf16(x * inverse * w), mask=inside)


def mixes(
    streams: torch.Tensor, weights: MixWeights, norm_eps: float, hc_eps: float, iterations: int
) -> Mixes:
    """As `compute.layers.hyper_connections.mixes`, of bf16 `streams` [T, hc, D]."""
    tokens, hc, hidden = streams.shape
    width = hc * hidden
    share = columns_a_split(width, SPLITS, COLUMNS)
    splits = triton.cdiv(width, share)
    sums = torch.empty(splits, tokens, SUMS, device=streams.device)
    _mix_sums[(triton.cdiv(tokens, TOKENS), splits)](
        streams, weights.fn, sums, tokens, width, share, MIXES=weights.fn.shape[0],
        TOKENS=TOKENS, COLUMNS=COLUMNS, SUMS=SUMS, num_warps=4, num_stages=3,
    )  # fmt: skip
    made = Mixes(
        *(torch.empty(tokens, *shape, device=streams.device) for shape in ((hc,), (hc,), (hc, hc)))
    )
    mix_finish(
        sums, weights.scale, weights.base, *made,
        width=width, iterations=iterations, norm_eps=norm_eps, eps=hc_eps,
    )  # fmt: skip
    return made


def write_back(output: torch.Tensor, streams: torch.Tensor, by: Mixes) -> torch.Tensor:
    """As `compute.layers.hyper_connections.write_back`: bf16 [T, hc, D], new."""
    tokens, hc, width = streams.shape
    out = torch.empty_like(streams)
    block = min(1024, triton.next_power_of_2(width))
    _write_back[(tokens, triton.cdiv(width, block))](
        output, streams, by.post, by.comb, out, width, HC=hc, BLOCK=block, num_warps=4, **UNFUSED
    )  # fmt: skip
    return out


def collapse_norm(
    streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """bf16 [T, D]: `rms_norm` of `collapse`, what a sublayer reads of bf16 `streams` [T, hc, D]."""
    tokens, hc, width = streams.shape
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=streams.device)
    block = triton.next_power_of_2(width)
    _collapse_norm[(tokens,)](
        streams, pre, weight, out, width, eps,
        HC=hc, BLOCK=block, num_warps=max(1, min(16, block // 512)), **UNFUSED,
    )  # fmt: skip
    return out
