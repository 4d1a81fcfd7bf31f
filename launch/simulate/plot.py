"""Simulated waiting as a PNG: one panel a bandwidth, one line a policy and prefetch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import ResourceError, UsageError


def write_plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Stalled ms a token by cache size. Raises UsageError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib: pip install 'headrace[plot]'; the table needs nothing"
        ) from None
    bandwidths = sorted({figures["bandwidth"] for figures in results})
    figure = Figure(figsize=(4.5 * len(bandwidths), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(bandwidths), squeeze=False)[0]
    for panel, bandwidth in zip(panels, bandwidths, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for figures in results:
            if figures["bandwidth"] == bandwidth:
                name = f"{figures['policy']}, {figures['prefetch']}"
                point = (100 * figures["cache"], figures["stalled_ms_per_token"])
                lines.setdefault(name, []).append(point)
        for name, points in lines.items():
            panel.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        panel.set_title(f"{bandwidth / 1e9:.3g} GB/s")
        panel.set_xlabel("cache, % of all experts")
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("stalled, ms a token")
    panels[-1].legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written ({error.strerror})") from None
