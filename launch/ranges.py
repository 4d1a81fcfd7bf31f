"""Ranges of numbers on the command line, so that a wrong one is refused before the start."""

from __future__ import annotations

import math
from typing import Any

import click

COUNT = click.IntRange(1, 1 << 40)
TOP_K = click.IntRange(0, 1 << 31)
SEED = click.IntRange(-(1 << 63), (1 << 63) - 1)


class _Finite(click.FloatRange):
    """A range by itself lets NaN pass, of which no comparison holds."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


TEMPERATURE = _Finite(min=0.0)
TOP_P = _Finite(0.0, 1.0, min_open=True)
MIN_P = _Finite(0.0, 1.0)
