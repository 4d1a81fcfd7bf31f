"""Trainable weights under their checkpoint names, and products with their stored forms.

Owns the two holders that most of the model is made of; masters are fp32 and are rounded where they
are used, inside the compiled functions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tools.train import rounding


class Matrix(nn.Module):
    """A weight [out, in]."""

    def __init__(self, out: int, width: int, zero: bool = False) -> None:
        super().__init__()
        weight = torch.zeros(out, width) if zero else torch.randn(out, width) * width**-0.5
        self.weight = nn.Parameter(weight)


class Scale(nn.Module):
    """The weight of an RMS norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def fp8_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """bf16 product of bf16 `x` and a master stored in fp8, both rounded as inference does."""
    return F.linear(rounding.activation(x), rounding.fp8_weight(weight))


def bf16_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """bf16 product of bf16 `x` and a master stored in bf16."""
    return F.linear(x, rounding.stored_bf16(weight))
