"""The engram gate: every stream takes as much of the looked-up value as its key agrees with it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.numeric import as_bf16, release_next, sigmoid, to_bf16, wait_for_previous


@triton.jit
def _engram_add(
    streams, key_value, q_weight, k_weight, pre, collapsed, H, eps, inverse_root,
    HC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    release_next()
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    streams += token * HC * H
    key_value += token * (HC + 1) * H
    value = tl.load(key_value + HC * H + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(HC):
        s = tl.load(streams + i * H + column, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(key_value + i * H + column, mask=inside, other=0.0).to(tl.float32)
        qw = tl.load(q_weight + i * H + column, mask=inside, other=0.0).to(tl.float32)
        kw = tl.load(k_weight + i * H + column, mask=inside, other=0.0).to(tl.float32)
        agreement = tl.sum(s * (qw * kw) * key, axis=0)
        agreement *= 1.0 / tl.sqrt_rn(tl.sum(s * s, axis=0) / H + eps)
        agreement *= 1.0 / tl.sqrt_rn(tl.sum(key * key, axis=0) / H + eps) * inverse_root
        root = tl.sqrt_rn(tl.maximum(tl.abs(agreement), 1e-6))
        sign = tl.where(agreement > 0, 1.0, tl.where(agreement < 0, -1.0, 0.0))
        new = to_bf16(s + sigmoid(sign * root) * value)
        tl.store(streams + i * H + column, as_bf16(new), mask=inside)
        total += tl.load(pre + token * HC + i) * new
    tl.store(collapsed + token * H + column, as_bf16(total), mask=inside)


def engram_add(
    streams: torch.Tensor,
    key_value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    pre: torch.Tensor,
    collapsed: torch.Tensor,
    *,
    eps: float,
) -> None:
    """Add the gated value to bf16 `streams` [T, hc, H] in place, and collapse them anew.

    `key_value` bf16 [T, (hc + 1) * H]: a key a stream, then the value; `q_weight`, `k_weight` [hc,
    H]; `collapsed` bf16 [T, H] = bf16(sum_j pre_j S_j) with `pre` fp32 [T, hc].
    """
    tokens, hc, width = streams.shape
    block = triton.next_power_of_2(width)
    _engram_add[(tokens,)](
        streams, key_value, q_weight, k_weight, pre, collapsed, width, eps, width**-0.5,
        HC=hc, BLOCK=block, num_warps=max(1, min(16, block // 512)), **PDL,
    )  # fmt: skip
