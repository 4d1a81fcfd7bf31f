"""The arena's slots: free, given to a read, or waiting until compute is done with them.

Reclaiming is RCU: whoever takes an expert out of the directory, resident or arriving, retires its
slot here with compute's epoch of that moment, and the slot is free once the epoch has passed it.
"""

from __future__ import annotations

from collections import deque

from protocol.layouts import Directory, Progress, full_fence


class SlotPool:
    """Owns the free list and the retired slots of `directory.slots` slots."""

    def __init__(self, directory: Directory, progress: Progress) -> None:
        self._directory = directory
        self._progress = progress
        self._free = list(range(directory.slots - 1, -1, -1))
        self._retired: deque[tuple[int, int]] = deque()

    @property
    def free(self) -> int:
        """Slots that a read may take now."""
        return len(self._free)

    @property
    def coming(self) -> int:
        """Slots that are free or will be once compute's epoch has passed."""
        return len(self._free) + len(self._retired)

    def take(self) -> tuple[int, int]:
        """A free slot and its new generation. The generation changes before any byte does."""
        slot = self._free.pop()
        self._directory.generation[slot] += 1
        return slot, int(self._directory.generation[slot])

    def retire(self, slot: int) -> None:
        """Return a slot of which the directory said something until just before this call."""
        full_fence()
        self._retired.append((slot, int(self._progress.words[Progress.EPOCH])))

    def reclaim(self) -> None:
        """Free every retired slot whose epoch compute has passed."""
        epoch = int(self._progress.words[Progress.EPOCH])
        while self._retired and self._retired[0][1] < epoch:
            self._free.append(self._retired.popleft()[0])
