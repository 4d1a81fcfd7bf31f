"""Which reader gets an order, and when: every idle one, and one more ahead if that is urgent.

Owns how many orders each reader holds. What the order is, is the residency's decision.
"""

from __future__ import annotations

from collections.abc import Iterator

from expert_io.reads import Order
from expert_io.residency import Residency

# Orders queued at a reader behind the one it reads.
READ_AHEAD = 1


class Dispatcher:
    """Hands out `residency`'s orders."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._held: dict[int, int] = {}

    def joined(self, reader: int) -> None:
        """`reader` is there, or there again, with nothing in its hands."""
        self._held[reader] = 0

    def answered(self, reader: int) -> None:
        """`reader` has one order less."""
        self._held[reader] -= 1

    def orders(self, now: float) -> Iterator[Order]:
        """Every reader gets an order, then a second one to go on with at once. Each is decided on
        only when the one before is out, so that the first reader begins that much earlier.

        The second is urgent only: what is queued at a reader cannot be overtaken, and nothing is
        more urgent. Without it a reader idles for a round trip between the pieces of a miss.
        """
        for ahead in range(READ_AHEAD + 1):
            for reader in [reader for reader, held in self._held.items() if held == ahead]:
                order = self._residency.next_order(reader, now, urgent_only=ahead > 0)
                if order is None:
                    break
                self._held[reader] += 1
                yield order

    @property
    def must_look(self) -> bool:
        """Whether a reader idles for want of compute's progress, which sends no message."""
        return self._residency.blocked and 0 in self._held.values()
