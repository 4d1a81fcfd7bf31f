"""The eviction that no policy can beat, for the simulator: it is given the future."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Container, Iterable

from expert_io.policy import Key

NEVER = 1 << 62


class Belady:
    """Gives up the key whose next use is furthest away (Belady, 1966).

    `future` are all picks as (time, key) with times that do not fall; the owner sets `now` to the
    time of the picks at hand before it reports them.
    """

    def __init__(self, future: Iterable[tuple[int, Key]]) -> None:
        self.now = -1
        self._times: dict[Key, list[int]] = {}
        for time, key in future:
            self._times.setdefault(key, []).append(time)
        self._heap: list[tuple[int, Key]] = []
        self._next: dict[Key, int] = {}  # of resident keys; other heap entries are stale

    def inserted(self, key: Key) -> None:
        self._push(key)

    def used(self, key: Key) -> None:
        if key in self._next:
            self._push(key)

    def removed(self, key: Key) -> None:
        self._next.pop(key, None)

    def victim(self, protected: Container[Key]) -> Key | None:
        kept, found = [], None
        while self._heap and found is None:
            away, key = entry = self._heap[0]
            if self._next.get(key) != -away:
                heapq.heappop(self._heap)
            elif -away <= self.now:
                # Its use went by without being reported: look further.
                heapq.heappop(self._heap)
                self._push(key)
            elif key in protected:
                kept.append(heapq.heappop(self._heap))
            else:
                found = key
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return found

    def _push(self, key: Key) -> None:
        times = self._times.get(key, [])
        place = bisect_right(times, self.now)
        # Keys that never return differ by when they were last used, which decides nothing.
        self._next[key] = times[place] if place < len(times) else NEVER
        heapq.heappush(self._heap, (-self._next[key], key))
