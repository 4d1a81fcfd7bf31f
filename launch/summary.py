"""What a run comes to: the table after it, and the same figures for a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from launch.options import format_size
from protocol import counters
from protocol.messages import Finished


def run_figures(
    text: str, finished: Finished, stats: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """The documented JSON keys, then every process's own counters under `processes`."""
    own, experts = finished.figures, stats.get("experts", {})
    return {
        "text": text,
        "finish_reason": finished.reason,
        "prompt_tokens": finished.prompt_tokens,
        "reused_tokens": finished.reused_tokens,
        "tokens": finished.tokens,
        "tokens_per_s": own.get(counters.TOKENS_PER_S, 0.0),
        "ttft_s": own.get(counters.TTFT_S, 0.0),
        "expert_hits": int(own.get(counters.DEMAND_HITS, 0)),
        "expert_misses": int(own.get(counters.DEMAND_MISSES, 0)),
        "reads_urgent": int(experts.get(counters.READS_URGENT, 0)),
        "reads_predicted": int(experts.get(counters.READS_PREDICTED, 0)),
        "reads_background": int(experts.get(counters.READS_BACKGROUND, 0)),
        "predicted_used": int(experts.get(counters.PREDICTED_USED, 0)),
        "predicted_late": int(experts.get(counters.PREDICTED_LATE, 0)),
        "read_bytes": int(experts.get(counters.READ_BYTES, 0)),
        "stall_expert_s": own.get(counters.STALL_EXPERT_S, 0.0),
        "stall_engram_s": own.get(counters.STALL_ENGRAM_S, 0.0),
        "processes": {name: dict(figures) for name, figures in stats.items()},
    }


def run_table(figures: Mapping[str, Any]) -> Table:
    """A short table of `run_figures`."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    hits, misses = figures["expert_hits"], figures["expert_misses"]
    share = f" ({hits / (hits + misses):.1%} hits)" if hits + misses else ""
    table.add_row("tokens", f"{figures['tokens']} after a prompt of {figures['prompt_tokens']}")
    table.add_row("speed", f"{figures['tokens_per_s']:.2f} tokens/s")
    table.add_row("first token", f"{figures['ttft_s']:.2f} s")
    table.add_row("experts", f"{hits} hits, {misses} misses{share}")
    table.add_row(
        "reads",
        f"{figures['reads_urgent']} urgent, {figures['reads_predicted']} predicted "
        f"({figures['predicted_used']} used, {figures['predicted_late']} late), "
        f"{figures['reads_background']} background, {format_size(figures['read_bytes'])}",
    )
    table.add_row(
        "stalled",
        f"{figures['stall_expert_s']:.2f} s on experts, "
        f"{figures['stall_engram_s']:.2f} s on engram rows",
    )
    return table
