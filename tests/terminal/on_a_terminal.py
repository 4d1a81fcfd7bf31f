"""A command on a pseudo-terminal of its own, as a person would run it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Terminal:
    """What the command has written, and a keyboard for it."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode("utf-8", "surrogateescape"))

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Until `text` has appeared since the last call."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"{text!r} did not appear in:\n{self.shown}")
        self.shown = self.shown.split(text, 1)[1]

    def exit_code(self, seconds: float = 20.0) -> int:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._read(0.05)
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"still running after {seconds} s:\n{self.shown}")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._descriptor)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:
            return False  # the other end is closed
        if b"\x1b[6n" in data:
            self.type("\x1b[1;1R")  # where the cursor is, which line editors ask for
        self.shown += data.decode("utf-8", "replace")
        return bool(data)


@contextmanager
def on_a_terminal(*arguments: str, environment: dict[str, str]) -> Iterator[Terminal]:
    pid, descriptor = pty.fork()
    if pid == 0:
        # As a shell there would have it, though the tests may run in the background.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ.update(environment, TERM="xterm-256color", OMP_NUM_THREADS="1")
        os.execv(sys.executable, [sys.executable, str(ROOT / "launch.py"), *arguments])
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    terminal = Terminal(pid, descriptor)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture
def private(tmp_path: Path) -> dict[str, str]:
    """An environment whose history and states stay in the test's own directory."""
    return {
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": "",
        "XDG_CACHE_HOME": "",
        "XDG_CONFIG_HOME": "",
    }
