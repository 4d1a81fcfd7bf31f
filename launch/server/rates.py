"""What happened between two samples of the engine's counters. Plain arithmetic, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.server.engine import Stats
from protocol import counters


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at `time` (CLOCK_MONOTONIC seconds). `tokens` are all tokens generated,
    `decode_tokens` those that followed another, which took `decode_seconds`."""

    time: float
    stats: Stats
    tokens: int
    decode_tokens: int
    decode_seconds: float
    prefill_seconds: float

    def total(self, name: str) -> float:
        """A counter, summed over the processes that have it."""
        return sum(figures.get(name, 0.0) for figures in self.stats.values())


def rates(before: Sample, after: Sample) -> dict[str, Any]:
    """Rates a second, shares, and milliseconds a pass, None where nothing happened.

    A pass is one token in decode and one chunk in prefill. Precision and recall as in
    `protocol.counters`, of this interval.
    """
    seconds = max(after.time - before.time, 1e-9)

    def grown(name: str) -> float:
        # A replaced process counts from 0 again.
        return max(0.0, after.total(name) - before.total(name))

    hits, misses = grown(counters.DEMAND_HITS), grown(counters.DEMAND_MISSES)
    issued, used = grown(counters.PREDICTED_ISSUED), grown(counters.PREDICTED_USED)
    rows, rows_read = grown(counters.ENGRAM_ROWS), grown(counters.ENGRAM_ROWS_READ)
    decode_tokens = after.decode_tokens - before.decode_tokens
    decode_seconds = after.decode_seconds - before.decode_seconds
    return {
        "seconds": seconds,
        "tokens_per_s": decode_tokens / decode_seconds if decode_tokens else None,
        "tokens": after.tokens - before.tokens,
        "pass_ms": _pass_ms(grown, decode_seconds + after.prefill_seconds - before.prefill_seconds),
        "hit_rate": _share(hits, hits + misses),
        "misses": misses,
        "reads_per_s": {
            "urgent": grown(counters.READS_URGENT) / seconds,
            "predicted": grown(counters.READS_PREDICTED) / seconds,
            "background": grown(counters.READS_BACKGROUND) / seconds,
        },
        "read_bytes_per_s": grown(counters.READ_BYTES) / seconds,
        "precision": _share(used, issued),
        "recall": _share(used, used + misses),
        "queue_depth": after.total(counters.QUEUE_DEPTH),
        "resident_experts": after.total(counters.RESIDENT_EXPERTS),
        "engram_rows_per_s": rows / seconds,
        "engram_hit_rate": _share(grown(counters.ENGRAM_CACHE_HITS), rows),
        "engram_read_us": _share(1e6 * grown(counters.ENGRAM_READ_SECONDS), rows_read),
    }


def _pass_ms(grown: Any, busy_seconds: float) -> dict[str, float] | None:
    """Where a pass's milliseconds went: waiting for experts, for engram rows, and the rest."""
    steps = grown(counters.STEPS)
    if not steps or busy_seconds <= 0:
        return None
    expert = 1000 * grown(counters.STALL_EXPERT_S) / steps
    engram = 1000 * grown(counters.STALL_ENGRAM_S) / steps
    whole = 1000 * busy_seconds / steps
    return {"compute": max(0.0, whole - expert - engram), "expert": expert, "engram": engram}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
