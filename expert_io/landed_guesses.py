"""Resident experts that were read for a guess and have not been picked since.

Owns whether their layer has been routed yet. Until then they are worth keeping; from then on they
were wrong, and stand here only so that a later use or their eviction is counted.
"""

from __future__ import annotations

from expert_io.policy import Key
from expert_io.returns import Returns


class LandedGuesses:
    """Tells `returns` which guesses came true. `expected` are those whose layer is still ahead,
    with the (step, layer) they are for."""

    def __init__(self, returns: Returns) -> None:
        self._returns = returns
        self.expected: dict[Key, tuple[int, int]] = {}
        self._wrong: set[Key] = set()

    def landed(self, key: Key, due: tuple[int, int]) -> None:
        """`key` is resident for a guess."""
        self.expected[key] = due

    def routed(self, until: tuple[int, int]) -> None:
        """What was due by (step, layer) `until` and has not been picked was wrong."""
        for key in [key for key, due in self.expected.items() if due <= until]:
            self._returns.wrong(key)
            del self.expected[key]
            self._wrong.add(key)

    def picked(self, key: Key) -> bool:
        """Whether `key` was here for a guess, which has been of use now, however late."""
        in_time = self.expected.pop(key, None) is not None
        if in_time:
            self._returns.came_true()
        return in_time or self._forget(key)

    def evicted(self, key: Key) -> bool:
        """Whether `key` was here for a guess, and never of use."""
        return self.expected.pop(key, None) is not None or self._forget(key)

    def _forget(self, key: Key) -> bool:
        known = key in self._wrong
        self._wrong.discard(key)
        return known
