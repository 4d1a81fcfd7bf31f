"""`/metrics`: the engine's counters and the server's own, in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from launch.server.activity import Activity
from launch.server.engine import Stats
from launch.server.waiting_line import WaitingLine
from protocol import counters

# Counters that go down as well as up.
GAUGES = frozenset(
    (
        counters.QUEUE_DEPTH,
        counters.QUEUE_DEPTH_MAX,
        counters.RESIDENT_EXPERTS,
        counters.TOKENS_PER_S,
    )
)


class _Snapshot:
    """The engine's counters at one moment, for one scrape."""

    def __init__(self, stats: Stats, activity: Activity, line: WaitingLine) -> None:
        self._stats = stats
        self._activity = activity
        self._line = line

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        names = sorted({name for figures in self._stats.values() for name in figures})
        for name in names:
            kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            family = kind(f"headrace_{name}", counters.MEANINGS.get(name, ""), labels=["process"])
            for process, figures in self._stats.items():
                if name in figures:
                    family.add_metric([process], figures[name])
            yield family
        requests = CounterMetricFamily(
            "headrace_requests", "Requests by how they ended", labels=["outcome"]
        )
        for outcome, count in self._activity.outcomes.items():
            requests.add_metric([outcome], count)
        yield requests
        activity, line = self._activity, self._line
        for name, value, says in (
            ("prompt_tokens", activity.prompt_tokens, "Prompt tokens"),
            ("reused_tokens", activity.reused_tokens, "Prompt tokens taken from kept states"),
            ("tokens", activity.tokens, "Tokens generated"),
            ("decode_seconds", activity.decode_seconds, "Seconds between tokens"),
        ):
            yield CounterMetricFamily(f"headrace_server_{name}", says, value=value)
        yield GaugeMetricFamily("headrace_requests_running", "Computing now", value=line.running)
        yield GaugeMetricFamily("headrace_requests_waiting", "In the line", value=line.waiting)


def metrics_text(stats: Stats, activity: Activity, line: WaitingLine) -> bytes:
    """The whole page."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats, activity, line))
    return generate_latest(registry) + generate_latest(activity.registry)
