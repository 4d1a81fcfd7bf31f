"""Simulated figures as a table, with a bar for the waiting of each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

BAR = 20


def results_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One line a run; bars are to one scale."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    names = ("cache", "disk", "policy", "prefetch")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in ("misses", "MB read", "precision", "recall", "hidden", "ms/token", "stalled"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    most = max((figures["stalled_ms_per_token"] for figures in results), default=0.0)
    for figures in results:
        stalled = figures["stalled_ms_per_token"]
        table.add_row(
            f"{100 * figures['cache']:.3g}%",
            f"{figures['bandwidth'] / 1e9:.3g} GB/s",
            figures["policy"],
            figures["prefetch"],
            f"{figures['misses_per_token']:.2f}",
            f"{figures['read_bytes_per_token'] / 1e6:.4g}",
            _share(figures["precision"]),
            _share(figures["recall"]),
            _share(figures["hidden"]),
            f"{figures['ms_per_token']:.2f}",
            f"{stalled:.2f}",
            Text("█" * round(BAR * stalled / most) if most else "", style="cyan"),
        )
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
