"""Eviction that finds out which of several ways suits what is going on.

Text that moves on within a topic wants what is used least to go, a sudden change of topic what was
used longest ago, and text that comes round again and slightly exceeds the cache wants newcomers to
go. All are tried, without bytes, on every use there is; the cache follows the one that would have
missed least of late.
"""

from __future__ import annotations

from collections.abc import Container

from expert_io.policy import EvictionPolicy, Key, LeastRecentlyUsed
from expert_io.rates import LeastExpected, NewcomersFirst, UseRates


class _Tried:
    """A cache of keys alone under one policy, and how often it missed, aged."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._here: set[Key] = set()
        self.misses = 0.0

    def use(self, key: Key, slots: int, kept: float) -> None:
        """Use `key`, with room for `slots` keys; of the misses so far `kept` still counts."""
        self._policy.used(key)
        self.misses *= kept
        if key in self._here:
            return
        self.misses += 1
        while len(self._here) >= slots:
            victim = self._policy.victim(())
            assert victim is not None
            self._policy.removed(victim)
            self._here.remove(victim)
        self._policy.inserted(key)
        self._here.add(key)


class Adaptive:
    """Gives up what the policy would that has missed least of late.

    Misses are forgotten by half in `HALF_LIFE` times as many uses as there are residents.
    """

    HALF_LIFE = 16
    # Trying waits until a victim is wanted, when readers have their orders; but not for ever.
    MOST_UNTRIED = 4096

    def __init__(self, seed: int = 0) -> None:
        self._rates = UseRates()
        self._policies = self._ways()
        self._tried = tuple(_Tried(policy) for policy in self._ways())
        self._slots = 1
        self._untried: list[Key] = []

    def inserted(self, key: Key) -> None:
        for policy in self._policies:
            policy.inserted(key)
        self._slots = max(self._slots, len(self._policies[0]))

    def used(self, key: Key) -> None:
        for policy in self._policies:
            policy.used(key)
        self._untried.append(key)
        if len(self._untried) > self.MOST_UNTRIED:
            self._try()

    def removed(self, key: Key) -> None:
        for policy in self._policies:
            policy.removed(key)

    def victim(self, protected: Container[Key]) -> Key | None:
        self._try()
        best = min(range(len(self._tried)), key=lambda number: self._tried[number].misses)
        return self._policies[best].victim(protected)

    def _ways(self) -> tuple[LeastExpected, LeastRecentlyUsed, NewcomersFirst]:
        """The first of those that do equally well is followed."""
        return LeastExpected(self._rates), LeastRecentlyUsed(), NewcomersFirst(self._rates)

    def _try(self) -> None:
        kept = 2 ** (-1 / (self.HALF_LIFE * self._slots))
        for key in self._untried:
            self._rates.used(key)
            for tried in self._tried:
                tried.use(key, self._slots, kept)
        self._untried.clear()
