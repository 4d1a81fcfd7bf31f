"""What the expert service writes to a trace: demands as spans, and how it stands as counters.

A demand's span lasts from compute's asking until the last of its experts has landed or failed. Off,
it keeps nothing and its timer does not run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from protocol import counters
from protocol.trace import Tracer

SAMPLE_S = 0.02
# Demands open at once; compute has given up older ones, which it does without a word.
MOST_OPEN = 1000


@dataclass(slots=True)
class _Span:
    begin_ns: int
    layer: int
    experts: int
    missing: set[int]


class ServiceTrace:
    """Wraps the service's tracer; `figures` gives its counters at any moment."""

    def __init__(
        self,
        tracer: Tracer,
        figures: Callable[[], Mapping[str, float]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._tracer = tracer
        self._figures = figures
        self._loop = loop
        self._open: dict[int, _Span] = {}
        self._last = (0.0, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._sample()

    def start(self, path: str) -> None:
        """Write to `path` from now on."""
        self._tracer.start(path)
        self._sample()

    def stop(self) -> None:
        """Complete the file, if there is one."""
        self._tracer.stop()
        self._open.clear()

    def asked(self, demand: int, layer: int, experts: list[int]) -> None:
        """A demand has arrived, perhaps not for the first time."""
        if self._tracer.enabled and demand not in self._open:
            span = _Span(time.monotonic_ns(), layer, len(experts), set(experts))
            self._open[demand] = span
            if len(self._open) > MOST_OPEN:
                del self._open[min(self._open)]

    def answered(self, demand: int, experts: list[int]) -> None:
        """These experts of the demand have landed or failed."""
        span = self._open.get(demand)
        if span is None:
            return
        span.missing.difference_update(experts)
        if not span.missing:
            del self._open[demand]
            end, track = time.monotonic_ns(), "demands"
            about = {"layer": span.layer, "experts": span.experts}
            self._tracer.complete("demand", span.begin_ns, end, track, **about)

    def _sample(self) -> None:
        """Write the counters, and again in a while as long as the trace is on."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._tracer.enabled:
            return
        self._timer = self._loop.call_later(SAMPLE_S, self._sample)
        figures = self._figures()
        for name in (counters.QUEUE_DEPTH, counters.RESIDENT_EXPERTS):
            self._tracer.counter(name, value=figures[name])
        (then, had), now = self._last, time.monotonic()
        has = figures.get(counters.READ_BYTES, 0.0)
        self._last = (now, has)
        # The first sample of a trace has nothing recent to compare with.
        if now - then < 10 * SAMPLE_S:
            self._tracer.counter("read bytes/s", value=(has - had) / (now - then))
