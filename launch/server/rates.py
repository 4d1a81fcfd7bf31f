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

    def of(self, process: str, name: str) -> float:
        """A counter of one process; some names are counted on both sides of a socket."""
        return self.stats.get(process, {}).get(name, 0.0)


def rates(before: Sample, after: Sample) -> dict[str, Any]:
    """Rates a second, shares, and milliseconds a pass, None where nothing happened.

    A pass is one token in decode and one chunk in prefill. Precision and recall as in
    `protocol.counters`, of this interval.
    """
    seconds = max(after.time - before.time, 1e-9)

    def grown(process: str, name: str) -> float:
        # A replaced process counts from 0 again, and one too busy to answer is missing.
        return max(0.0, after.of(process, name) - before.of(process, name))

    def experts(name: str) -> float:
        return grown("experts", name)

    def engram(name: str) -> float:
        return grown("engram", name)

    hits = grown("compute", counters.DEMAND_HITS)
    misses = grown("compute", counters.DEMAND_MISSES)
    issued, used = experts(counters.PREDICTED_ISSUED), experts(counters.PREDICTED_USED)
    rows = engram(counters.ENGRAM_ROWS)
    read_us = 1e6 * engram(counters.ENGRAM_READ_SECONDS)
    decode_tokens = after.decode_tokens - before.decode_tokens
    decode_seconds = after.decode_seconds - before.decode_seconds
    prefill_seconds = after.prefill_seconds - before.prefill_seconds
    return {
        "seconds": seconds,
        "tokens_per_s": decode_tokens / decode_seconds if decode_tokens else None,
        "tokens": after.tokens - before.tokens,
        "pass_ms": _pass_ms(
            grown("compute", counters.STEPS),
            decode_seconds + prefill_seconds,
            grown("compute", counters.STALL_EXPERT_S),
            grown("compute", counters.STALL_ENGRAM_S),
        ),
        "hit_rate": _share(hits, hits + misses),
        "misses": misses,
        "reads_per_s": {
            "urgent": experts(counters.READS_URGENT) / seconds,
            "predicted": experts(counters.READS_PREDICTED) / seconds,
            "background": experts(counters.READS_BACKGROUND) / seconds,
        },
        "read_bytes_per_s": experts(counters.READ_BYTES) / seconds,
        "precision": _share(used, issued),
        "recall": _share(used, used + misses),
        "queue_depth": after.of("experts", counters.QUEUE_DEPTH),
        "resident_experts": after.of("experts", counters.RESIDENT_EXPERTS),
        "engram_rows_per_s": rows / seconds,
        "engram_hit_rate": _share(engram(counters.ENGRAM_CACHE_HITS), rows),
        "engram_row_us": _share(read_us, engram(counters.ENGRAM_ROWS_READ)),
    }


def _pass_ms(steps: float, busy: float, expert: float, engram: float) -> dict[str, float] | None:
    """Where a pass's milliseconds went: waiting for experts, for engram rows, and the rest."""
    if steps <= 0 or busy <= 0:
        return None
    waits = {"expert": 1000 * expert / steps, "engram": 1000 * engram / steps}
    return {"compute": max(0.0, 1000 * busy / steps - sum(waits.values())), **waits}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
