"""Eviction policies that keep newcomers apart until they have shown a second use.

What is used once, by a rare topic or a wrong guess, then cannot push out what is used again and
again. Each remembers some keys it gave up (without their bytes), since a quick return of one says
that it went too early.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from itertools import chain

from expert_io.policy import Key

Line = OrderedDict[Key, None]


def _first(line: Line, protected: Container[Key]) -> Key | None:
    return next((key for key in line if key not in protected), None)


def _remember(ghosts: Line, key: Key, most: int) -> None:
    ghosts[key] = None
    ghosts.move_to_end(key)
    while len(ghosts) > most:
        ghosts.popitem(last=False)


class SegmentedLru:
    """SLRU: a probation line and a protected line, both by recency.

    A second use moves a key to the protected line, which holds at most `PROTECTED` of all; what it
    sheds gets another turn in probation.
    """

    PROTECTED = 0.8

    def __init__(self, seed: int = 0) -> None:
        self._probation: Line = OrderedDict()
        self._protected: Line = OrderedDict()

    def inserted(self, key: Key) -> None:
        self.removed(key)
        self._probation[key] = None

    def used(self, key: Key) -> None:
        if key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._probation:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > self.PROTECTED * self._count():
                shed, _ = self._protected.popitem(last=False)
                self._probation[shed] = None

    def removed(self, key: Key) -> None:
        self._probation.pop(key, None)
        self._protected.pop(key, None)

    def victim(self, protected: Container[Key]) -> Key | None:
        everything = chain(self._probation, self._protected)
        return next((key for key in everything if key not in protected), None)

    def _count(self) -> int:
        return len(self._probation) + len(self._protected)


class TwoQueues:
    """2Q (Johnson and Shasha, 1994): newcomers in a first-in first-out line that is emptied first.

    A key that returns while it is remembered goes to the main line, which is kept by recency. Uses
    within the newcomers' line change nothing: they belong to one burst.
    """

    NEWCOMERS, REMEMBERED = 0.25, 0.5

    def __init__(self, seed: int = 0) -> None:
        self._new: Line = OrderedDict()
        self._main: Line = OrderedDict()
        self._ghosts: Line = OrderedDict()

    def inserted(self, key: Key) -> None:
        known = key in self._main or key in self._ghosts
        self._ghosts.pop(key, None)
        self.removed(key)
        (self._main if known else self._new)[key] = None

    def used(self, key: Key) -> None:
        if key in self._main:
            self._main.move_to_end(key)

    def removed(self, key: Key) -> None:
        count = len(self._new) + len(self._main)
        if key in self._new:
            del self._new[key]
            _remember(self._ghosts, key, int(self.REMEMBERED * count) + 1)
        self._main.pop(key, None)

    def victim(self, protected: Container[Key]) -> Key | None:
        count = len(self._new) + len(self._main)
        lines = (self._new, self._main)
        if len(self._new) <= self.NEWCOMERS * count:
            lines = (self._main, self._new)
        first = _first(lines[0], protected)
        return first if first is not None else _first(lines[1], protected)


class S3Fifo:
    """S3-FIFO (Yang et al., 2023): a small and a main first-in first-out line, and remembered keys.

    Newcomers enter the small line; at its end those used since move to the main line and the others
    go. In the main line a used key goes round again, one use less. What returns while remembered
    enters the main line.
    """

    SMALL, MOST_USES = 0.1, 3

    def __init__(self, seed: int = 0) -> None:
        self._small: Line = OrderedDict()
        self._main: Line = OrderedDict()
        self._ghosts: Line = OrderedDict()
        self._uses: dict[Key, int] = {}

    def inserted(self, key: Key) -> None:
        known = key in self._main or key in self._ghosts
        self._ghosts.pop(key, None)
        self.removed(key)
        (self._main if known else self._small)[key] = None
        self._uses[key] = 0

    def used(self, key: Key) -> None:
        if key in self._uses:
            self._uses[key] = min(self.MOST_USES, self._uses[key] + 1)

    def removed(self, key: Key) -> None:
        if key in self._small:
            del self._small[key]
            _remember(self._ghosts, key, len(self._uses))
        self._main.pop(key, None)
        self._uses.pop(key, None)

    def victim(self, protected: Container[Key]) -> Key | None:
        # Each turn lowers a key's uses, moves it to the main line, or passes a protected one.
        for _ in range((self.MOST_USES + 3) * len(self._uses)):
            from_small = len(self._small) > self.SMALL * len(self._uses) or not self._main
            line = self._small if from_small else self._main
            key = next(iter(line))
            if key in protected:
                line.move_to_end(key)
                if all(other in protected for other in line):
                    break
            elif not self._uses[key]:
                return key
            else:
                del line[key]
                self._main[key] = None
                self._uses[key] = 0 if from_small else self._uses[key] - 1
        everything = chain(self._small, self._main)
        return next((key for key in everything if key not in protected), None)
