"""Which resident expert to give up for another: eviction policies as plain classes.

A policy sees the life of every resident key (`inserted`, `used`, `removed`) and names a victim when
asked. It does no I/O and reads no clock, so a simulator can replay traces through the same objects.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Container
from itertools import islice
from typing import Protocol

Key = tuple[int, int]  # (layer, expert)


class EvictionPolicy(Protocol):
    """What the residency asks of a policy."""

    def inserted(self, key: Key) -> None:
        """`key` became resident; counts as a use."""

    def used(self, key: Key) -> None:
        """A layer picked `key`, resident or not; most policies ignore those that are not."""

    def removed(self, key: Key) -> None:
        """`key` is no longer resident."""

    def victim(self, protected: Container[Key]) -> Key | None:
        """The resident key to give up next, none of `protected`; None where all are protected."""


class LeastRecentlyUsed:
    """Gives up the key unused for longest."""

    def __init__(self, seed: int = 0) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def inserted(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def used(self, key: Key) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def removed(self, key: Key) -> None:
        self._order.pop(key, None)

    def victim(self, protected: Container[Key]) -> Key | None:
        return next((key for key in self._order if key not in protected), None)

    def __len__(self) -> int:
        return len(self._order)


class RandomAmongOldest(LeastRecentlyUsed):
    """Gives up a random key among the oldest `SHARE` of all.

    A cyclic use of slightly more keys than fit makes plain recency miss every time, since what is
    oldest is what comes next; a random old victim breaks the cycle.
    """

    SHARE = 0.08
    # Walking an ordered dict from its old end costs time for every step; a few hundred candidates
    # randomize as well as a few thousand.
    MOST = 256

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._random = random.Random(seed)

    def victim(self, protected: Container[Key]) -> Key | None:
        count = min(self.MOST, max(1, int(len(self._order) * self.SHARE)))
        for key in islice(self._order, self._random.randrange(count), count):
            if key not in protected:
                return key
        return super().victim(protected)


class Clock(LeastRecentlyUsed):
    """Gives up the first key on a ring that was not used since the hand last passed it.

    The ring is the ordered dict itself, the hand its old end: a key that was used in the meantime
    goes to the young end unmarked.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._marked: set[Key] = set()

    def used(self, key: Key) -> None:
        if key in self._order:
            self._marked.add(key)

    def removed(self, key: Key) -> None:
        super().removed(key)
        self._marked.discard(key)

    def victim(self, protected: Container[Key]) -> Key | None:
        # A key is unmarked at most once, so twice round sees every one of them unmarked.
        for _ in range(2 * len(self._order)):
            key = next(iter(self._order))
            if key not in self._marked and key not in protected:
                return key
            self._marked.discard(key)
            self._order.move_to_end(key)
        return None
