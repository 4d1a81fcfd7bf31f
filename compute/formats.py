"""The number formats of the checkpoint and the roundings of the model, as plain torch functions.

Owns decoding (e8m0, e4m3, e2m1), the quantized products' activation rounding, and the fp8 and fp4
round trips of KV and index vectors. Every function is exact: its result is the one rounding that
the model defines, on any device. Formulas: `act_quant` and `fp4_act_quant` of DeepSeek's reference.
"""

from __future__ import annotations

from functools import cache

import torch

GROUP = 32  # columns that share one scale: fp8 activations, fp4 weights, engram rows, index vectors
KV_GROUP = 16  # columns that share one e4m3 scale in compressed KV
E4M3_MAX = 448.0
E2M1_MAX = 6.0
NAN_SCALE = 255  # the e8m0 byte that means NaN

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNED_E2M1 = (*_E2M1, *(-value for value in _E2M1))


@cache
def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`value` as a tensor without dimensions: torch would convert a Python number on each use."""
    return torch.tensor(value, dtype=dtype)


def decode_e8m0(scale_bytes: torch.Tensor) -> torch.Tensor:
    """fp32 2^(byte - 127) of uint8 `scale_bytes`; byte 0 is the subnormal 2^-127, 255 is NaN."""
    return scale_bytes.view(torch.float8_e8m0fnu).to(torch.float32)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of e4m3fn `codes` given as uint8 (or already typed float8_e4m3fn)."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


@cache
def _byte_table(device: torch.device) -> torch.Tensor:
    """For each byte of two e2m1 codes its two fp32 values, low nibble first, in 8 bytes."""
    pairs = [(_SIGNED_E2M1[byte & 15], _SIGNED_E2M1[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs).view(torch.float64).flatten().to(device)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 2n] of uint8 `packed` [..., n]; the low nibble is the even column."""
    # One selection of 8 bytes a packed byte: a table of pairs, so no interleaving pass follows.
    pairs = _byte_table(packed.device).index_select(0, packed.to(torch.int32).flatten())
    return pairs.view(packed.shape).view(torch.float32)


def dequantize_fp8_weight(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[N, K] of an fp8 weight: e4m3 `codes` [N, K], e8m0 `scales` [ceil(N/32), ceil(K/32)].

    Exact in bf16 too: a scale is a power of two, and a code has three mantissa bits.
    """
    rows, columns = codes.shape
    scale = decode_e8m0(scales).to(dtype).repeat_interleave(GROUP, 1)[:, :columns]
    values = codes.view(torch.float8_e4m3fn).to(dtype)
    return values.mul_(scale.repeat_interleave(GROUP, 0)[:rows])


def dequantize_fp4_weight(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [N, K] of an fp4 weight: uint8 `packed` [N, K/2], e8m0 `scales` [N, K/32]."""
    values = decode_e2m1(packed)
    _grouped(values, GROUP).mul_(decode_e8m0(scales).unsqueeze(-1))
    return values


def dequantize_engram_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 [..., n] of engram rows: e4m3 `codes` [..., n], e8m0 `scales` [..., n/32]."""
    groups = _grouped(decode_e4m3(codes), GROUP)
    return (groups * decode_e8m0(scales).unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def act_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize bf16 `x` [..., K] in groups of 32: e4m3 codes [..., K], fp32 scales [..., K/32].

    amax = max(|x|, 1e-4), scale = 2^ceil(log2(amax * fp32(1/448))), code = e4m3(x / scale).
    """
    codes, scale = _quantize_groups(x)
    return codes.flatten(-2), scale.squeeze(-1)


def round_trip_fp8(x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """bf16 `x` [..., K] quantized by `act_quant` and dequantized again, exact in bf16 and fp32."""
    codes, scale = _quantize_groups(x)
    return codes.float().mul_(scale).view(x.shape).to(dtype)


def _quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`act_quant` with the groups kept apart: codes [..., K/32, 32], scales [..., K/32, 1]."""
    groups = _grouped(x.float(), GROUP)
    amax = torch.linalg.vector_norm(groups, torch.inf, -1, keepdim=True).clamp_min_(1e-4)
    # 448 is 1.75 * 2^8: the exponent less 8, and one more where the mantissa is above 1.75. No
    # quotient of a bf16 number exceeds 448 then, so the reference's clamp has nothing to do.
    bits = amax.view(torch.int32) + scalar(0x001FFFFF - (8 << 23), torch.int32)
    scale = bits.bitwise_and_(scalar(0x7F800000, torch.int32)).view(torch.float32)
    return (groups / scale).to(torch.float8_e4m3fn), scale


def round_trip_fp4_index(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` [..., K] on the fp4 grid of index vectors: groups of 32, power-of-two scales.

    amax floored at 6 * 2^-126, scale = 2^ceil(log2(amax * fp32(1/6))).
    """
    groups = _grouped(x.float(), GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(E2M1_MAX * 2.0**-126)
    scale = _power_of_two_above(amax.mul_(scalar(1 / E2M1_MAX)))
    return _round_e2m1(groups, scale).flatten(-2).to(torch.bfloat16)


def round_trip_fp4_kv(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` [..., K] on the fp4 grid of compressed KV: groups of 16, e4m3 scales.

    amax floored at 6 * 2^-9, scale = e4m3(amax / 6), saturated at 448.
    """
    groups = _grouped(x.float(), KV_GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(E2M1_MAX * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp_max_(E4M3_MAX).to(torch.float8_e4m3fn).float()
    return _round_e2m1(groups, scale).flatten(-2).to(torch.bfloat16)


def _grouped(x: torch.Tensor, size: int) -> torch.Tensor:
    """[..., K] as [..., K / size, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def _power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2 x) of normal positive fp32 `x`, exactly: a carry out of the mantissa bits."""
    bits = x.view(torch.int32) + scalar(0x007FFFFF, torch.int32)
    return bits.bitwise_and_(scalar(0x7F800000, torch.int32)).view(torch.float32)


def _round_e2m1(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 `x` rounded to e2m1 multiples of `scale`, to nearest, ties to the even code.

    The grid's step is 0.5 below 2, 1 below 4, 2 above; counted in steps the even codes are the
    even numbers in each range, so round-half-even of the count is the tie rule.
    """
    scaled = (x / scale).clamp_(-E2M1_MAX, E2M1_MAX)
    size = scaled.abs()
    step = 0.5 + 0.5 * (size >= 2) + (size >= 4)
    return (scaled / step).round_().mul_(step).mul_(scale)
