"""Who has given no sign of life for how long: a process that is stopped or hangs does not die.

Plain bookkeeping for whoever asks the processes and hears their answers. Promises: only time in
which this process itself was looking counts, so that a group stopped and resumed as a whole (Ctrl-Z
and `fg`) finds nobody silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# Looks within the bound: one answer that is late must not be the only one that counts.
LOOKS = 10


class Silence:
    """Seconds of silence by process; `bound` of them are too many. Look every `pause` seconds."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.pause = bound / LOOKS
        self._looked = 0.0
        # Process id and seconds: a process that was replaced starts anew.
        self._silent: dict[str, tuple[int, float]] = {}

    def begin(self, now: float) -> None:
        """Count from `now` on, with nobody silent."""
        self._looked = now
        self._silent.clear()

    def heard(self, name: str) -> None:
        """`name` lives."""
        self._silent.pop(name, None)

    def look(self, pids: Mapping[str, int], now: float) -> list[str]:
        """Those of `pids` (by name) that have been silent for the bound."""
        # A look that comes later than that was held up here: by a signal, or by a busy machine.
        passed = min(now - self._looked, 2 * self.pause)
        self._looked = now
        before = self._silent
        self._silent = {}
        for name, pid in pids.items():
            known, seconds = before.get(name, (pid, 0.0))
            self._silent[name] = (pid, seconds + passed if known == pid else passed)
        return [name for name, (_, seconds) in self._silent.items() if seconds >= self.bound]


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped `pid`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False  # ended in this moment
    return fields[0] in "Tt"
