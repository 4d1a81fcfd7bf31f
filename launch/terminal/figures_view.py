"""The figures of `/stats` and `/residency` as one screen of text. Draws, and asks nobody."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launch.options import format_size

Figures = dict[str, Any]
SPARKS = " ▁▂▃▄▅▆▇█"
PARTS = (
    ("compute", "compute", "blue"),
    ("expert", "waiting for experts", "dark_orange"),
    ("engram", "waiting for engram rows", "green"),
)
LANES = (("urgent", "dark_orange"), ("predicted", "blue"), ("background", "bright_black"))
# Cold to just read; one character is two layers of some experts.
HEAT = ("grey19", "#104281", "#2a78d6", "#86b6ef", "#cde2fb")


def figures_view(stats: Figures, residency: Figures, width: int, height: int) -> RenderableType:
    """Everything at once, in `width` columns and about `height` lines."""
    return Group(
        _heading(stats),
        Columns(
            [_speed(stats), _pass(stats), _reads(stats), _rest(stats)], expand=True, equal=True
        ),
        Panel(
            _heat(residency, width - 4, max(4, height - 22)),
            title=f"experts in memory: {_resident(stats)}",
            border_style="dim",
        ),
    )


def _heading(stats: Figures) -> Text:
    queue, request = stats["queue"], stats["request"]
    text = Text.assemble(("Headrace ", "bold"), (stats["model"], "cyan"))
    text.append(f"  up {_duration(stats['uptime_s'])}")
    text.append(f"  {queue['running']} running, {queue['waiting']} of {queue['capacity']} waiting")
    if request is not None and request["tokens"]:
        text.append(f"  {request['tokens']} tokens in {request['seconds']:.0f} s")
    elif request is not None:
        text.append(f"  reading the prompt: {request['prefilled']} of {request['prompt_tokens']}")
    return text


def _speed(stats: Figures) -> Panel:
    values = [sample["tokens_per_s"] for sample in stats["history"]]
    table = _table()
    table.add_row("tokens/s", _number(_last(stats, lambda s: s["tokens_per_s"])))
    table.add_row("experts found", _share(_last(stats, lambda s: s["hit_rate"])))
    table.add_row("tokens so far", f"{stats['totals']['tokens']:,}")
    return _panel("speed", Group(table, Text(sparkline(values, 28), style="blue")))


def _pass(stats: Figures) -> Panel:
    split = _last(stats, lambda s: s["pass_ms"])
    table = _table()
    for key, name, color in PARTS:
        table.add_row(Text(name, style=color), f"{split[key]:.1f} ms" if split else "-")
    bar = Text()
    whole = sum(split.values()) if split else 0.0
    for key, _, color in PARTS:
        bar.append("█" * round(28 * split[key] / whole) if split and whole else "", style=color)
    return _panel("where a token's time goes", Group(table, bar))


def _reads(stats: Figures) -> Panel:
    table = _table()
    now = stats["now"]
    for lane, color in LANES:
        table.add_row(Text(lane, style=color), f"{now['reads_per_s'][lane]:.0f}/s" if now else "-")
    table.add_row("disk", f"{format_size(now['read_bytes_per_s'])}/s" if now else "-")
    table.add_row("precision", _share(_last(stats, lambda s: s["precision"])))
    table.add_row("recall", _share(_last(stats, lambda s: s["recall"])))
    return _panel("reads and prediction", table)


def _rest(stats: Figures) -> Panel:
    table = _table()
    now = stats["now"]
    table.add_row("read queue", f"{now['queue_depth']:.0f}" if now else "-")
    row_us = _last(stats, lambda s: s["engram_row_us"])
    table.add_row("engram row", f"{row_us:.0f} µs" if row_us is not None else "-")
    table.add_row("engram cache", _share(_last(stats, lambda s: s["engram_hit_rate"])))
    memory = stats["memory"]
    table.add_row("expert memory", format_size(memory["arena_bytes"]))
    table.add_row("processes", format_size(sum(memory["resident_bytes"].values())))
    return _panel("queue, engram, memory", table)


def _resident(stats: Figures) -> str:
    held = stats["now"]["resident_experts"] if stats["now"] else 0
    return f"{held:.0f} of {stats['memory']['all_experts']}, {stats['memory']['slots']} slots"


def _heat(residency: Figures, width: int, height: int) -> Text:
    """Half blocks: two rows of cells a line; several experts share a cell where they are many."""
    cells = np.frombuffer(base64.b64decode(residency["cells"]), np.uint8)
    grid = cells.reshape(residency["layers"], residency["experts"]).astype(float)
    grid = _shrunk(_shrunk(grid, 2 * height, 0), max(1, width), 1)
    if len(grid) % 2:
        grid = np.vstack((grid, np.zeros((1, grid.shape[1]))))
    text = Text()
    for upper, lower in zip(grid[::2], grid[1::2], strict=True):
        for top, bottom in zip(upper, lower, strict=True):
            text.append("▀", style=f"{_warmth(top)} on {_warmth(bottom)}")
        text.append("\n")
    text.rstrip()
    return text


def _shrunk(grid: np.ndarray[Any, Any], most: int, axis: int) -> np.ndarray[Any, Any]:
    """The mean over groups of neighbours along `axis`, so that at most `most` remain."""
    if grid.shape[axis] <= most:
        return grid
    groups = np.array_split(grid, most, axis=axis)
    return np.concatenate([group.mean(axis=axis, keepdims=True) for group in groups], axis=axis)


def _warmth(value: float) -> str:
    if value <= 0:
        return HEAT[0]
    return HEAT[1 + min(3, int(value / 64))]


def sparkline(values: list[float | None], width: int) -> str:
    """The last `width` values as bars; a gap where there was none."""
    shown = values[-width:]
    top = max((value for value in shown if value is not None), default=0.0)
    steps = len(SPARKS) - 1
    return "".join(
        " " if value is None or top <= 0 else SPARKS[max(1, round(steps * value / top))]
        for value in shown
    )


def _last(stats: Figures, pick: Callable[[Figures], Any]) -> Any:
    """The newest value there is, of the last ten samples."""
    for sample in reversed(stats["history"][-10:]):
        value = pick(sample)
        if value is not None:
            return value
    return None


def _table() -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column()
    table.add_column(justify="right")
    return table


def _panel(title: str, inner: RenderableType) -> Panel:
    return Panel(inner, title=title, border_style="dim", height=8)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s"
