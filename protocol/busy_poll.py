"""When a process that waits for messages looks for them again and again, and when it sleeps.

Waking a process that sleeps takes longer than most of what it then does, and a miss wakes one after
the other. So while a token is decoded, those on a miss's path do not sleep where the machine has a
core for each of them. For how long is decided once for the whole group and told to each in its
start message.
"""

from __future__ import annotations

import os
import time

# Longer than a layer of a decode step and than most reads: a disk that takes longer for one costs
# more than waking does. Short enough that a group without work looks idle at once.
BUSY_POLL_S = 0.02
# The expert service and the engram service.
SERVICES = 2
# For the threads that carry the messages, the kernel's part of a read, and everybody else.
SPARE_CORES = 2


def busy_poll_seconds(cores: int, readers: int, compute_threads: int) -> float:
    """How long processes of a group look before they sleep: 0 where `cores` are too few for that,
    since whoever looks would then take a core from whoever works."""
    needed = compute_threads + readers + SERVICES + SPARE_CORES
    return BUSY_POLL_S if cores >= needed else 0.0


class BusyPoll:
    """Whether one process still looks, for `seconds` after whatever made more work likely."""

    def __init__(self, seconds: float) -> None:
        """With 0 it always sleeps."""
        self._seconds = seconds
        self._until = 0.0

    def expect_more(self) -> None:
        """More is likely to come soon."""
        self._until = time.monotonic() + self._seconds

    def look_again(self) -> bool:
        """Whether to look again at once rather than sleep; whoever lacks this core has had it."""
        if time.monotonic() >= self._until:
            return False
        os.sched_yield()
        return True
