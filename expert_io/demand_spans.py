"""Trace spans of demands: from compute's asking until the last of its experts has landed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from protocol.trace import Tracer


@dataclass(slots=True)
class _Span:
    begin_ns: int
    layer: int
    experts: int
    missing: set[int]


class DemandSpans:
    """Keeps what is needed only while `tracer` is on."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[int, _Span] = {}

    def asked(self, demand: int, layer: int, experts: list[int]) -> None:
        """A demand has arrived, perhaps not for the first time."""
        if self._tracer.enabled and demand not in self._open:
            span = _Span(time.monotonic_ns(), layer, len(experts), set(experts))
            self._open[demand] = span

    def answered(self, demand: int, experts: list[int]) -> None:
        """These experts of the demand have landed or failed."""
        span = self._open.get(demand)
        if span is None:
            return
        span.missing.difference_update(experts)
        if not span.missing:
            self._tracer.complete(
                "demand",
                span.begin_ns,
                time.monotonic_ns(),
                "demands",
                layer=span.layer,
                experts=span.experts,
            )
            del self._open[demand]
            # Compute gives up in order, and never hears of what it has given up.
            for given_up in [number for number in self._open if number < demand - _MOST_OPEN]:
                del self._open[given_up]


# Demands open at once; older ones without an answer were abandoned by compute.
_MOST_OPEN = 1000
