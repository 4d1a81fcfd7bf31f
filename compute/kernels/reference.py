"""Every kernel's arithmetic in plain torch, with the signature of its Triton form.

Owns the meaning of the kernels, and writes nothing down twice: what `compute.layers` computes as a
function is called here. Kernels are tested against this module, and on a CPU it stands in for them.
Products accumulate in `PRODUCT`; set to float64 it gives the truth that errors are stated
against. Scratch arguments are accepted and left alone.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import cast

import torch

from compute import formats
from compute.kernels.attention import AttentionScratch
from compute.kernels.limbs import Limbs
from compute.kernels.reference_ask import ask, await_rows, tell  # noqa: F401 - likewise
from compute.kernels.reference_index import (  # noqa: F401 - the rest of this module
    choose_blocks,
    choose_rows,
    compress_step,
    index_key_step,
    index_queries,
    index_scores,
)
from compute.kernels.reference_router import route  # noqa: F401 - likewise
from compute.layers import attention, engram, hyper_connections, moe
from compute.layers.norm import rms_norm as normalize
from compute.rope import Rotation, rotate_tail, rotation
from compute.weights import EngramWeights

#: What matrix products are formed in.
PRODUCT = torch.float32


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., N] in PRODUCT of `x` [..., K] and `weight` [N, K]."""
    return x.to(PRODUCT) @ weight.to(PRODUCT).mT


def _fp8_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, groups: int = 1
) -> torch.Tensor:
    values = formats.dequantize_fp8_weight(weight, scale)
    grouped = values.unflatten(0, (groups, -1))
    return torch.einsum(
        "tgk,gnk->tgn", x.unflatten(-1, (groups, -1)).to(PRODUCT), grouped.to(PRODUCT)
    ).flatten(-2)


def _into_streams(
    y: torch.Tensor,
    streams: torch.Tensor,
    post_mix: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    collapsed: torch.Tensor,
) -> None:
    by = hyper_connections.Mixes(pre, post_mix, comb)
    streams.copy_(hyper_connections.write_back(y.to(torch.bfloat16), streams, by))
    collapsed.copy_(hyper_connections.collapse(streams, pre))


def _splits(out: torch.Tensor) -> torch.Tensor:
    """`out`, zeroed: a product here is one share, whatever the number of splits."""
    return out.zero_()[0]


def fp8_matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    *,
    groups: int = 1,
    round_trip: bool = False,
) -> None:
    y = _fp8_product(x, weight, scale, groups)
    if out.dtype == torch.float32:
        _splits(out).copy_(y)
    else:
        y = y.to(torch.bfloat16)
        out.copy_(formats.round_trip_fp8(y) if round_trip else y)


def fp8_matvec_to_streams(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    collapsed: torch.Tensor,
) -> None:
    _into_streams(_fp8_product(x, weight, scale), streams, post, comb, pre, collapsed)


def _swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    return moe.swiglu(gate.to(torch.bfloat16), up.to(torch.bfloat16), limit)


def fp8_gate_up(
    x: torch.Tensor,
    gate: torch.Tensor,
    gate_scale: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    limit: float,
) -> None:
    a = _swiglu(_fp8_product(x, gate, gate_scale), _fp8_product(x, up, up_scale), limit)
    out.copy_(formats.round_trip_fp8(a.to(torch.bfloat16)))


def bf16_matvec(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    y = _product(x, weight)
    (_splits(out) if out.dtype == torch.float32 else out).copy_(y)


def _bytes_at(address: int, *shape: int) -> torch.Tensor:
    size = torch.Size(shape).numel()
    held = (ctypes.c_uint8 * size).from_address(address)
    flat: torch.Tensor = torch.frombuffer(held, dtype=torch.uint8)
    return flat.view(shape)


def _fp4_at(code_address: int, scale_address: int, rows: int, columns: int) -> torch.Tensor:
    return formats.dequantize_fp4_weight(
        _bytes_at(code_address, rows, columns // 2), _bytes_at(scale_address, rows, columns // 32)
    )


def _quantized(y: torch.Tensor, into: Limbs) -> None:
    """bf16 `y` [n, K] quantized into limbs."""
    codes, scales = formats.act_quant(y)
    whole = (codes.float() * 512).to(torch.int32)
    rest = whole
    for limb in range(3):
        low = ((rest & 255) ^ 128) - 128
        into.bytes[limb] = low.unflatten(-1, (-1, 2, 4)).transpose(-3, -2).flatten(-2)
        rest = (rest - low) >> 8
    into.sums.copy_(whole.unflatten(-1, (-1, 32)).sum(-1))
    into.scales.copy_(scales)


def values_of(limbs: Limbs) -> torch.Tensor:
    """fp32 [n, K]: what `limbs` stand for."""
    low, middle, high = limbs.bytes.int()
    halves = low + 256 * middle + 65536 * high
    whole = halves.unflatten(-1, (-1, 4)).transpose(-3, -2).flatten(-3).unflatten(-1, (-1, 32))
    values: torch.Tensor = whole / 512 * limbs.scales.unsqueeze(-1)
    return values.flatten(-2)


def experts_gate_up(
    x: Limbs,
    table: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    limit: float,
) -> None:
    values = values_of(x)
    (tokens, columns), (picks, rows) = values.shape, out.shape
    for pick, addresses in enumerate(table.tolist()):
        token = values[pick // (picks // tokens)]
        gate = _product(token, _fp4_at(addresses[0], addresses[1], rows, columns))
        up = _product(token, _fp4_at(addresses[2], addresses[3], rows, columns))
        out[pick] = weights.flatten()[pick] * _swiglu(gate, up, limit)


def experts_down(a: Limbs, table: torch.Tensor, out: torch.Tensor) -> None:
    values = values_of(a)
    rows, columns = out.shape[-1], values.shape[1]
    for pick, addresses in enumerate(table.tolist()):
        weight = _fp4_at(addresses[4], addresses[5], rows, columns)
        out.view(-1, rows)[pick] = _product(values[pick], weight)


def _in_order(parts: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
    total = parts[:, 0].float()
    for part in range(1, parts.shape[1]):
        total = total + parts[:, part].float()
    return total if extra is None else total + extra.float()


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    normed: torch.Tensor | None,
    rounded: torch.Tensor | None,
    limbs: Limbs | None = None,
    *,
    eps: float,
) -> None:
    y = normalize(x, weight.float(), eps)
    if normed is not None:
        normed.copy_(y)
    if rounded is not None:
        rounded.copy_(formats.round_trip_fp8(y))
    if limbs is not None:
        _quantized(y, limbs)


def normed_fp8_matvec(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    normed: torch.Tensor | None = None,
    *,
    eps: float,
) -> None:
    rounded = torch.empty_like(x)
    rms_norm(x, norm, normed, rounded, eps=eps)
    fp8_matvec(rounded, weight, scale, out)


def normed_bf16_matvec(
    x: torch.Tensor,
    norm: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    rounded: torch.Tensor,
    limbs: Limbs,
    *,
    eps: float,
) -> None:
    normed = torch.empty_like(x)
    rms_norm(x, norm, normed, rounded, limbs, eps=eps)
    bf16_matvec(normed, weight, out)


def quantize(x: torch.Tensor, rounded: torch.Tensor | None, limbs: Limbs | None = None) -> None:
    if rounded is not None:
        rounded.copy_(formats.round_trip_fp8(x))
    if limbs is not None:
        _quantized(x, limbs)


def finish_query_kv(
    partials: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor,
    rows: torch.Tensor,
    *,
    eps: float,
) -> None:
    latent, kv = partials.sum(0).to(torch.bfloat16).split((query.shape[1], rows.shape[1]), -1)
    query.copy_(formats.round_trip_fp8(normalize(latent, q_weight.float(), eps)))
    kv = rotate_tail(normalize(kv, kv_weight.float(), eps), Rotation(cos, sin))
    rows[slots.long()] = formats.round_trip_fp8(kv)


def mix_dot(streams: torch.Tensor, matrix: torch.Tensor, sums: torch.Tensor) -> None:
    flat, mixes = streams.flatten(1).to(PRODUCT), matrix.shape[0]
    share = _splits(sums)
    share[:, :mixes] = _product(flat, matrix)
    share[:, mixes] = flat.square().sum(-1)


def mix_finish(
    sums: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    pre: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    width: int,
    iterations: int,
    norm_eps: float,
    eps: float,
) -> None:
    total, mixes = sums.sum(0), base.shape[0]
    m = total[:, :mixes] * torch.rsqrt(total[:, mixes : mixes + 1] / width + norm_eps)
    made = hyper_connections.split_mixes(m, scale, base, eps, iterations)
    for into, value in zip((pre, post, comb), made, strict=True):
        into.copy_(value)


def post(
    parts: torch.Tensor,
    extra: torch.Tensor | None,
    streams: torch.Tensor,
    post_mix: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    collapsed: torch.Tensor,
) -> None:
    _into_streams(_in_order(parts, extra), streams, post_mix, comb, pre, collapsed)


def begin_token(
    token: torch.Tensor,
    position: torch.Tensor,
    embed: torch.Tensor,
    plain: torch.Tensor,
    yarn: torch.Tensor,
    ratios: torch.Tensor,
    streams: torch.Tensor,
    collapsed: torch.Tensor,
    pre: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slot: torch.Tensor,
    window_index: torch.Tensor,
    visible: torch.Tensor,
) -> None:
    at, width = int(position), window_index.shape[1]
    streams.copy_(embed[token].unsqueeze(1).expand_as(streams))
    collapsed.copy_(embed[token])
    pre.copy_(hyper_connections.first_mix(1, pre.shape[1], pre.device))
    groups = position // ratios * ratios
    for turn, (of, frequency) in enumerate(
        [(position, plain), (position, yarn), *((group, yarn) for group in groups.split(1))]
    ):
        turned = rotation(of, frequency)
        cos[turn : turn + 1], sin[turn : turn + 1] = turned
    slot.fill_(at % width)
    slots = attention.window_slots(position, width, 0)
    window_index.copy_(torch.where(slots < 0, -1, slots % width))
    visible.copy_((at + 1) // ratios)


def attend(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: torch.Tensor,
    window_index: torch.Tensor,
    compressed: torch.Tensor,
    chosen: torch.Tensor,
    sink: torch.Tensor,
    out: torch.Tensor,
    scratch: AttentionScratch,
) -> None:
    rotation = Rotation(cos, sin)
    index = torch.cat((window_index, chosen), 1)
    # An empty slot's bytes may be anything; its probability of zero must win.
    kv = torch.cat(
        (window[window_index.clamp_min(0).long()], compressed[chosen.clamp_min(0).long()]), 1
    ).masked_fill((index < 0).unsqueeze(-1), 0.0)
    query = rotate_tail(q, rotation).to(PRODUCT)
    y = attention.attend(query, kv.to(PRODUCT), index >= 0, sink.to(PRODUCT))
    out.copy_(rotate_tail(y.to(torch.bfloat16), rotation, inverse=True))


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
    weights = cast(
        EngramWeights, SimpleNamespace(q_weight=q_weight.float(), k_weight=k_weight.float())
    )
    streams.copy_(engram.engram_add(streams, key_value, weights, eps))
    collapsed.copy_(hyper_connections.collapse(streams, pre))
