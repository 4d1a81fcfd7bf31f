"""Rotary position embedding over adjacent pairs, with YaRN where a layer reads compressed KV.

Owns frequencies, angles and the rotation. Frequencies and angles (position x frequency) are formed
in fp32, as the reference does: at a position near a million the angle differs from one formed in
float64 by 0.01, and it is the fp32 one that the model was trained with.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from protocol.config import ModelConfig, RopeScaling


class Rotation(NamedTuple):
    """fp32 `cos` and `sin` [T, rotated dims / 2] of T positions."""

    cos: torch.Tensor
    sin: torch.Tensor


def frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """fp32 [dim / 2] radians a position: theta^(-2i/dim), by YaRN slowed where a turn is long.

    c(r) = dim ln(original / (2 pi r)) / (2 ln theta) is the pair that turns r times over the
    original context; pairs above c(beta_slow) are slowed by `factor`, those below c(beta_fast) are
    not, and a linear ramp joins them.
    """
    steps = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / theta**steps
    if scaling is None:
        return plain

    def pair_turning(turns: float) -> float:
        original = scaling.original_max_position_embeddings
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_turning(scaling.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


class Rope:
    """The model's two rotations: `plain` for window-only layers, `yarn` for all others."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        dim = config.qk_rope_head_dim
        # Computed on the CPU whatever the device: a power function's last bit differs between them.
        self._plain = frequencies(dim, config.rope_theta, None).to(device)
        yarn = frequencies(dim, config.compress_rope_theta, config.rope_scaling)
        self._yarn = yarn.to(device)

    @property
    def device(self) -> torch.device:
        """Where positions are and rotations come out."""
        return self._plain.device

    def plain(self, positions: torch.Tensor) -> Rotation:
        """For int64 `positions` [T], without YaRN."""
        return rotation(positions, self._plain)

    def yarn(self, positions: torch.Tensor) -> Rotation:
        """For int64 `positions` [T], with YaRN and the base of compressed layers."""
        return rotation(positions, self._yarn)


def rotation(positions: torch.Tensor, frequency: torch.Tensor) -> Rotation:
    """Angles of `positions` [T] at `frequency` [dim / 2], in fp32."""
    angles = torch.outer(positions.float(), frequency)
    return Rotation(angles.cos(), angles.sin())


def rotate_tail(x: torch.Tensor, by: Rotation, *, inverse: bool = False) -> torch.Tensor:
    """bf16 `x` [T, ..., D] with the last 2 * len(cos) columns rotated, pair by adjacent pair."""
    half = by.cos.shape[-1]
    turn = torch.complex(by.cos, -by.sin if inverse else by.sin)
    turn = turn.view(-1, *[1] * (x.dim() - 2), half)
    kept, tail = x.split((x.shape[-1] - 2 * half, 2 * half), -1)
    pairs = torch.view_as_complex(tail.float().view(*tail.shape[:-1], half, 2))
    turned = torch.view_as_real(pairs * turn).flatten(-2)
    return torch.cat((kept, turned.to(x.dtype)), dim=-1)
