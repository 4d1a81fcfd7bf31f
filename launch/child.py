"""One child process: how it is started, watched, and heard when it dies.

Promises: the child has its spec or is dead; its end closes `pidfd`'s wait; its stderr never blocks
it, and what it says there about its own end is kept for whoever reports that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import UsageError
from protocol.lifecycle import LAST_WORDS
from protocol.wire import MalformedMessage, Message

ROOT = Path(__file__).resolve().parent.parent


@dataclass(slots=True)
class Child:
    """A started child. `pidfd` becomes readable when it ends; `error` is its own account of why,
    empty where it gave none; `last_line` is what else it said last on stderr; `killed_for` is what
    it was killed for here."""

    name: str
    incarnation: int
    process: subprocess.Popen[str]
    pidfd: int
    pipe: int
    error: str = ""
    last_line: str = ""
    killed_for: str = ""
    _listener: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Its process id, valid until `reap`."""
        return self.process.pid

    def kill(self, why: str = "") -> None:
        """End it at once, also where it is stopped; harmless where it has ended."""
        self.killed_for = why
        self.process.send_signal(signal.SIGKILL)

    def reap(self) -> int:
        """Wait for its end and release what it held; the exit code, negative for a signal."""
        code = self.process.wait()
        if self._listener is not None:
            self._listener.join(timeout=1.0)
        for descriptor in (self.pidfd, self.pipe):
            os.close(descriptor)
        return code

    def last_words(self) -> str:
        """Why it ended, as far as it said anything."""
        return self.error or self.last_line


def spawn_child(
    module: str,
    spec: Message,
    pass_fds: Sequence[int],
    name: str,
    *,
    incarnation: int = 0,
    on_line: Callable[[str, str], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> Child:
    """Start `python -m protocol module` with `spec`, inheriting `pass_fds` under the same numbers.

    `on_line(name, line)` is called from another thread for every line it writes to stderr, but for
    the one that says why it ends.
    """
    # Before there is a process: one without its spec would only wait for its end.
    try:
        frame = spec.encode()
    except MalformedMessage as error:
        raise UsageError(f"{name} cannot be started with these options: {error}") from None
    receiving, sending = os.pipe()
    environment = {**os.environ, **(env or {})}
    # The child must run this code, also where it is used from a clone and not installed.
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    # Ctrl-C goes to all at a terminal. A child ignores it as soon as its modules are loaded; until
    # then it would end with a traceback. It inherits the mask and keeps it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "protocol", module, str(receiving), str(os.getpid())],
            pass_fds=(receiving, *pass_fds),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            errors="replace",
        )
    except BaseException:
        os.close(sending)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(receiving)
    try:
        child = Child(name, incarnation, process, os.pidfd_open(process.pid), sending)
        child._listener = threading.Thread(
            target=_listen, args=(child, on_line), daemon=True, name=f"{name}-stderr"
        )
        child._listener.start()
    except BaseException:
        # Too many open files or threads: nobody would watch it.
        process.kill()
        process.wait()
        os.close(sending)
        raise
    _send_spec(child, frame)
    return child


def _send_spec(child: Child, frame: bytes) -> None:
    data = len(frame).to_bytes(4, "little") + frame
    try:
        while data:
            data = data[os.write(child.pipe, data) :]
    except BrokenPipeError:
        return  # It has died already; whoever watches its pidfd says so.


def _listen(child: Child, on_line: Callable[[str, str], None] | None) -> None:
    assert child.process.stderr is not None
    for line in child.process.stderr:
        stripped = line.rstrip()
        if stripped.startswith(LAST_WORDS):
            child.error = stripped.removeprefix(LAST_WORDS)
        elif stripped:
            child.last_line = stripped
            if on_line is not None:
                on_line(child.name, stripped)
    child.process.stderr.close()
