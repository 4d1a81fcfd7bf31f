"""A disk that shares its bandwidth: how long reads take that are under way at the same time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskModel:
    """`bandwidth` bytes/s of the whole disk; every read first takes `latency` seconds.

    `concurrency` is how many reads it takes to get all of the bandwidth: with 1 a single read gets
    it, as large reads do on most NVMe disks; with as many as there are readers each has its own
    share, which is how `--disk-bandwidth` slows readers down.
    """

    bandwidth: float
    latency: float = 0.0
    concurrency: int = 1


@dataclass(slots=True)
class _Active:
    number: int
    left: float


class Disk:
    """Reads in progress. Times are seconds and never fall."""

    def __init__(self, model: DiskModel) -> None:
        self._model = model
        self._waiting: deque[tuple[float, int, float]] = deque()  # until when, number, bytes
        self._moving: list[_Active] = []
        self._now = 0.0
        self._next = math.inf

    def start(self, now: float, number: int, nbytes: int) -> None:
        """Begin a read."""
        self._pass(now)
        self._waiting.append((now + self._model.latency, number, nbytes))
        self._foresee()

    def next_end(self) -> float:
        """When the next read will be done, or the next will have had its latency; inf if none."""
        return self._next

    def finished(self, now: float) -> list[int]:
        """Take out the reads that are done by `now`, which is not beyond `next_end`."""
        if now < self._next:
            return []
        self._pass(now)
        while self._waiting and self._waiting[0][0] <= now:
            _, number, nbytes = self._waiting.popleft()
            self._moving.append(_Active(number, nbytes))
        # Less than what a nanosecond brings is rounding.
        rounding = 1e-9 * self._rate() + 0.01
        done = [read.number for read in self._moving if read.left <= rounding]
        self._moving = [read for read in self._moving if read.left > rounding]
        self._foresee()
        return done

    def _pass(self, now: float) -> None:
        if self._moving:
            moved = (now - self._now) * self._rate()
            for read in self._moving:
                read.left -= moved
        self._now = now

    def _foresee(self) -> None:
        self._next = self._waiting[0][0] if self._waiting else math.inf
        if self._moving:
            least = min(read.left for read in self._moving)
            self._next = min(self._next, self._now + least / self._rate())

    def _rate(self) -> float:
        """Bytes/s of each read past its latency."""
        return self._model.bandwidth / max(len(self._moving), self._model.concurrency)
