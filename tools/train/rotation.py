"""Rotary positions for training: cos and sin of every position, and the rotation of a tail.

Owns nothing but these two; layers with a compress ratio use YaRN frequencies, the others plain
ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from protocol.config import ModelConfig


class Angles(NamedTuple):
    """fp32 [..., qk_rope_head_dim / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


def angles(config: ModelConfig, compressed: bool, positions: torch.Tensor) -> Angles:
    """Of layers with a ratio (`compressed`) or without, at int64 `positions` [...]."""
    width = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    steps = torch.arange(0, width, 2, dtype=torch.float64)
    frequencies = theta ** (-steps / width)
    if compressed:
        scaling = config.rope_scaling

        def dimension(turns: float) -> float:
            span = scaling.original_max_position_embeddings / (2 * math.pi * turns)
            return width * math.log(span) / (2 * math.log(theta))

        low = max(math.floor(dimension(scaling.beta_fast)), 0)
        high = min(math.ceil(dimension(scaling.beta_slow)), width - 1)
        ramp = ((steps / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequencies = frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
    turn = positions.float()[..., None] * frequencies.float().to(positions.device)
    return Angles(turn.cos(), turn.sin())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """bf16 `x` [..., K] with its last 2 * cos.shape[-1] columns turned, adjacent pairs as
    complex."""
    turned = 2 * cos.shape[-1]
    head, tail = x[..., : x.shape[-1] - turned], x[..., x.shape[-1] - turned :]
    pairs = tail.float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    out = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([head, out.to(x.dtype)], -1)
