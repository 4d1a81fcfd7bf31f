"""The checkpoint's roundings inside training: exact forward, gradients as if nothing was rounded.

Owns the straight-through wrappers and the rounding of masters to their stored formats. Where
`compute.formats` rounds the same thing the results are the same bits; these are written without
in-place steps and cached scalars, so that a compiler makes one kernel of them and what surrounds
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

GROUP = 32
KV_GROUP = 16
E4M3_MAX = 448.0
E2M1_MAX = 6.0
SMALLEST_FP8_AMAX = 1e-4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _through(x: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`rounding(x)` in bf16 with the gradient of `x` itself."""
    with torch.no_grad():
        rounded = rounding(x.detach()).to(torch.bfloat16)
    through: torch.Tensor = _StraightThrough.apply(x.to(torch.bfloat16), rounded)  # type: ignore[no-untyped-call]
    return through


def activation(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` [..., K] as a quantized product sees it (fp8, groups of 32)."""
    return _through(x, _round_fp8)


def window_kv(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` [..., head_dim] as the window keeps it (fp8, groups of 32)."""
    return _through(x, _round_fp8)


def index_vector(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` on the fp4 grid of index queries and keys."""
    return _through(x, _round_fp4)


def compressed_kv(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` on the fp4 grid of compressed KV."""
    return _through(x, _round_fp4_kv)


def engram_rows(x: torch.Tensor) -> torch.Tensor:
    """fp32 rows [..., K] as their stored fp8 bytes decode: bf16, one scale per 32 columns."""
    return _through(x, _round_fp8)


def stored_bf16(weight: torch.Tensor) -> torch.Tensor:
    """fp32 master weight as stored in bf16."""
    return weight.to(torch.bfloat16)


def fp8_weight(weight: torch.Tensor) -> torch.Tensor:
    """fp32 master [N, K] as its stored fp8 form decodes: bf16, one scale per 32x32 tile."""
    return _through(weight, _round_fp8_weight)


def fp4_weight(weight: torch.Tensor) -> torch.Tensor:
    """fp32 master [..., K] as its stored fp4 form decodes: bf16, one scale per 32 columns."""
    return _through(weight, _round_fp4)


def fp8_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [..., K] and power-of-two scales fp32 [..., K/32] of `x` [..., K]."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    codes, scale = _fp8_codes(groups, amax)
    return codes.flatten(-2), scale.squeeze(-1)


def fp8_tiles(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [N, K] and power-of-two scales fp32 [N/32, K/32] of fp32 `weight` [N, K]."""
    tiles = _tiles(weight)
    codes, scale = _fp8_codes(tiles, tiles.abs().amax((1, 3), keepdim=True))
    return codes.reshape(weight.shape), scale[:, 0, :, 0]


def fp4_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 codes uint8 [N, K/2] and fp32 scales [N, K/32] of fp32 `weight` [N, K]."""
    values, scale = _fp4_groups(weight)
    codes = torch.searchsorted(torch.tensor(E2M1), values.abs()).to(torch.uint8)
    codes = (codes | (values < 0).to(torch.uint8) << 3).flatten(-2)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.squeeze(-1)


def _fp8_codes(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _power_of_two_above(amax.clamp_min(SMALLEST_FP8_AMAX) * (1 / E4M3_MAX))
    # A master in fp32 can lie a hair above 448 scales, because the product above is rounded.
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def _fp4_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e2m1 values [..., K/32, 32] and power-of-two scales [..., K/32, 1]."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126)
    scale = _power_of_two_above(amax * (1 / E2M1_MAX))
    return _round_e2m1(groups / scale), scale


def _round_fp8(x: torch.Tensor) -> torch.Tensor:
    codes, scale = fp8_groups(x)
    rounded: torch.Tensor = codes.float().unflatten(-1, (-1, GROUP)) * scale.unsqueeze(-1)
    return rounded.flatten(-2)


def _round_fp8_weight(weight: torch.Tensor) -> torch.Tensor:
    codes, scale = fp8_tiles(weight)
    return (_tiles(codes.float()) * scale[:, None, :, None]).reshape(weight.shape)


def _round_fp4(x: torch.Tensor) -> torch.Tensor:
    values, scale = _fp4_groups(x)
    return (values * scale).flatten(-2)


def _round_fp4_kv(x: torch.Tensor) -> torch.Tensor:
    groups = x.float().unflatten(-1, (-1, KV_GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    rounded: torch.Tensor = _round_e2m1(groups / scale) * scale
    return rounded.flatten(-2)


def _tiles(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.reshape(rows // GROUP, GROUP, columns // GROUP, GROUP)


def _power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2 x) of normal positive fp32 `x`, exactly: a carry out of the mantissa bits."""
    return ((x.view(torch.int32) + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 value of fp32 `x`, ties to the even code; the grid's step is 0.5, 1 or 2."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    size = x.abs()
    step = torch.where(size >= 4, 2.0, torch.where(size >= 2, 1.0, 0.5))
    return torch.round(x / step) * step
