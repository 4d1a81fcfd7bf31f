"""What the command line takes, so that anything else is refused by its name before the start."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import click

from launch.options import GIB, Cache, parse_cache, parse_size
from protocol.errors import UsageError


class Integer(click.IntRange):
    """In the digits 0 to 9: int() takes other alphabets' and underscores, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str) and not re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            self.fail(f"{value!r} is not a valid integer.", param, ctx)
        number: int = super().convert(value, param, ctx)
        return number


class Finite(click.FloatRange):
    """A range by itself lets NaN pass, of which no comparison holds."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        if isinstance(value, str) and (not value.isascii() or "_" in value):
            self.fail(f"{value!r} is not a valid number.", param, ctx)
        return number


class _NamedPath(click.Path):
    """An empty name, which a script's unset variable gives, would be the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not isinstance(value, str | Path):
            self.fail(f"{value} is not a name; write it in quotes.", param, ctx)
        if value == "":
            self.fail("the name is empty.", param, ctx)
        return Path(os.fsdecode(super().convert(value, param, ctx)))


class Size(click.ParamType):  # type: ignore[type-arg]  # older releases are not generic
    """Bytes, written as `launch.options.parse_size` reads them, from `least` to `most`."""

    name = "size"

    def __init__(self, least: float, most: float) -> None:
        self._least = least
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            count = parse_size(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)
        if not self._least <= count <= self._most:
            self.fail(f"{value} is not from {self._least} to {self._most} bytes.", param, ctx)
        return count


class CacheSize(click.ParamType):  # type: ignore[type-arg]
    """Bytes or a share of all experts, as `launch.options.parse_cache` reads them."""

    name = "cache"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Cache:
        try:
            return parse_cache(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


COUNT = Integer(1, 1 << 40)
TOP_K = Integer(0, 1 << 31)
SEED = Integer(-(1 << 63), (1 << 63) - 1)
READERS = Integer(1, 256)
THREADS = Integer(1, 1024)
# Repetitions of a measurement.
ROUNDS = Integer(1, 1_000_000)
PATH = _NamedPath(path_type=Path)
PIECE = Size(4096, GIB)
RATE = Size(1, 10**15)  # bytes a second
CACHE = CacheSize()
TEMPERATURE = Finite(min=0.0)
TOP_P = Finite(0.0, 1.0, min_open=True)
MIN_P = Finite(0.0, 1.0)
SHARE = Finite(0.0, 1.0)
SECONDS = Finite(0.0, 3600.0)
MILLISECONDS = Finite(0.0, 3.6e6)
MICROSECONDS = Finite(0.0, 3.6e9)
