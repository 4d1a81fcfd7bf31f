"""Who computes next: first come, first served, and no more in the line than were promised.

One sequence computes at a time. Promises: a full line refuses at once and says when to come back;
whoever leaves makes room, whether waiting or computing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

LONGEST_RETRY_S = 600
# How much the last request counts in the mean that Retry-After is computed from.
MEMORY = 0.2


class LineFull(Exception):
    """Nobody else may wait now. `retry_after` are whole seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests wait already; try again in {retry_after} s")
        self.retry_after = retry_after


class Turn:
    """One request's place in the line."""

    def __init__(self) -> None:
        self._came = asyncio.get_running_loop().create_future()
        self._began = 0.0

    @property
    def came(self) -> bool:
        """Whether it computes now."""
        return self._came.done()

    async def wait(self) -> None:
        """Until it may compute."""
        await asyncio.shield(self._came)


class WaitingLine:
    """`capacity` requests may wait beside the one that computes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._waiting: deque[Turn] = deque()
        self._current: Turn | None = None
        self._mean_seconds = 1.0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that compute, 0 or 1."""
        return int(self._current is not None)

    def join(self) -> Turn:
        """A place at the end; give it back with `leave`. Raises LineFull."""
        if self._current is not None and self.waiting >= self.capacity:
            raise LineFull(self.waiting, self._retry_after())
        turn = Turn()
        self._waiting.append(turn)
        self._advance()
        return turn

    def leave(self, turn: Turn) -> None:
        """Done, or no longer interested; harmless when repeated."""
        if turn is self._current:
            seconds = time.monotonic() - turn._began
            self._mean_seconds += MEMORY * (seconds - self._mean_seconds)
            self._current = None
            self._advance()
        elif turn in self._waiting:
            self._waiting.remove(turn)

    def before(self, turn: Turn) -> int:
        """How many compute before `turn` does."""
        return self._waiting.index(turn) + self.running if turn in self._waiting else 0

    def _advance(self) -> None:
        if self._current is None and self._waiting:
            self._current = self._waiting.popleft()
            self._current._began = time.monotonic()
            self._current._came.set_result(None)

    def _retry_after(self) -> int:
        seconds = math.ceil(self._mean_seconds * (self.waiting + self.running))
        return min(max(seconds, 1), LONGEST_RETRY_S)
