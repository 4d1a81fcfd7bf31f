"""How long compute waits for another process, and when it asks again."""

from __future__ import annotations

import os
import time

# Asking again is harmless, so it is only a matter of not flooding a peer that is merely slow.
REPEAT_S = 1.0
# A waiting process wakes this often: waiting must not look like being dead, and must not keep
# slots from being reclaimed.
WAKE_S = 0.001
# What a message says has come stands in shared memory before: the message's way takes several
# wake-ups, 0.4 ms on a small virtual machine. So a wait looks there by itself at first, between
# naps; one that takes longer than any healthy read is not worth the turns.
NAP_S = 0.00005
NAPPING_S = 0.1


class BoundedWait:
    """One wait for one thing. It ends after `timeout` seconds; asks repeat at 1, 3, 7, … s. For the
    first `busy_poll` seconds it does not sleep."""

    def __init__(self, timeout: float, busy_poll: float = 0.0) -> None:
        self._timeout = timeout
        self._busy_poll = busy_poll
        self._begin = time.monotonic()
        self._pause = REPEAT_S
        self._repeat_at = self._begin + self._pause

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self._begin

    def nap(self) -> float:
        """Nap where what is waited for may still come at any moment; then how many seconds to wait
        for a message before looking again."""
        seconds = self.seconds
        if seconds < self._busy_poll:
            os.sched_yield()
        elif seconds < NAPPING_S:
            time.sleep(NAP_S)
        else:
            return WAKE_S
        return 0.0

    @property
    def exhausted(self) -> bool:
        """Whether it has taken as long as it may."""
        return self.seconds >= self._timeout

    def time_to_repeat(self) -> bool:
        """Whether to ask again now; the next time is twice as long away."""
        now = time.monotonic()
        if now < self._repeat_at:
            return False
        self._pause *= 2
        self._repeat_at = now + self._pause
        return True
