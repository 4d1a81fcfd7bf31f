"""The checkpoint's roundings inside training: exact forward, gradients as if nothing was rounded.

Owns the straight-through wrappers and the rounding of weights to their stored formats. The rounding
of values is `compute.formats`' own, so training sees exactly what inference computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compute import formats

TILE = formats.GROUP
SMALLEST_AMAX = 1e-4


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _through(x: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        rounded = rounding(x.detach())
    return _StraightThrough.apply(x, rounded)


def activation(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` [..., K] as a quantized product sees it (fp8, groups of 32)."""
    return _through(x, formats.round_trip_fp8)


def window_kv(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` [..., head_dim] as the window keeps it (fp8, groups of 32)."""
    return _through(x, formats.round_trip_fp8)


def index_vector(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` on the fp4 grid of index queries and keys."""
    return _through(x, formats.round_trip_fp4_index)


def compressed_kv(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` on the fp4 grid of compressed KV."""
    return _through(x, formats.round_trip_fp4_kv)


def engram_rows(x: torch.Tensor) -> torch.Tensor:
    """fp32 rows [..., K] as their stored fp8 bytes decode: bf16, one scale per 32 columns."""
    return _through(x, formats.round_trip_fp8).to(torch.bfloat16)


def stored_bf16(weight: torch.Tensor) -> torch.Tensor:
    """fp32 master weight as stored in bf16."""
    return weight.to(torch.bfloat16)


def fp8_weight(weight: torch.Tensor) -> torch.Tensor:
    """fp32 master [N, K] as its stored fp8 form decodes: bf16, one scale per 32x32 tile."""
    return _through(weight, _round_fp8_weight).to(torch.bfloat16)


def fp4_weight(weight: torch.Tensor) -> torch.Tensor:
    """fp32 master [..., K] as its stored fp4 form decodes: bf16, one scale per 32 columns."""
    return _through(weight, formats.round_trip_fp4_index).to(torch.bfloat16)


def fp8_tiles(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes [N, K] and fp32 power-of-two scales [N/32, K/32] of fp32 `weight` [N, K].

    The smallest power of two that keeps every code within 448, as for activations.
    """
    rows, columns = weight.shape
    tiles = weight.reshape(rows // TILE, TILE, columns // TILE, TILE)
    amax = tiles.abs().amax((1, 3), keepdim=True).clamp_min(SMALLEST_AMAX)
    scale = formats._power_of_two_above(amax * (1 / formats.E4M3_MAX))
    codes = (tiles / scale).clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.reshape(rows, columns), scale[:, 0, :, 0]


def _round_fp8_weight(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    codes, scale = fp8_tiles(weight)
    tiles = codes.float().reshape(rows // TILE, TILE, columns // TILE, TILE)
    rounded = tiles * scale[:, None, :, None]
    return rounded.reshape(rows, columns).to(torch.bfloat16)


def fp4_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 codes uint8 [N, K/2] and fp32 scales [N, K/32] of fp32 `weight` [N, K]."""
    groups = weight.unflatten(-1, (-1, formats.GROUP))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(formats.E2M1_MAX * 2.0**-126)
    scale = formats._power_of_two_above(amax * (1 / formats.E2M1_MAX))
    rounded = formats.round_trip_fp4_index(weight).float().unflatten(-1, (-1, formats.GROUP))
    values = torch.tensor(formats._E2M1)
    codes = torch.searchsorted(values, (rounded / scale).abs()).to(torch.uint8)
    codes |= (rounded < 0).to(torch.uint8) << 3
    codes = codes.flatten(-2)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.squeeze(-1)
