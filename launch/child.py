"""One child process: how it is started, watched, and heard when it dies.

Promises: the child has its spec or is dead; its end closes `pidfd`'s wait; its stderr never blocks
it, and the last line of it is kept as its reason.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocol.wire import Message

ROOT = Path(__file__).resolve().parent.parent
KEPT_LINES = 20


@dataclass(slots=True)
class Child:
    """A started child. `pidfd` becomes readable when it ends; `lines` are its last on stderr."""

    name: str
    incarnation: int
    process: subprocess.Popen[str]
    pidfd: int
    pipe: int
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    _listener: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Its process id, valid until `reap`."""
        return self.process.pid

    def kill(self) -> None:
        """End it at once; harmless where it has ended."""
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
        """What it said last, or nothing."""
        return self.lines[-1] if self.lines else ""


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
    """Start `python -m module` with `spec`, inheriting `pass_fds` under the same numbers.

    `on_line(name, line)` is called from another thread for every line it writes to stderr.
    """
    receiving, sending = os.pipe()
    environment = {**os.environ, **(env or {})}
    # The child must run this code, also where it is used from a clone and not installed.
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(receiving), str(os.getpid())],
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
        os.close(receiving)
    child = Child(name, incarnation, process, os.pidfd_open(process.pid), sending)
    child._listener = threading.Thread(
        target=_listen, args=(child, on_line), daemon=True, name=f"{name}-stderr"
    )
    child._listener.start()
    _send_spec(child, spec)
    return child


def _send_spec(child: Child, spec: Message) -> None:
    frame = spec.encode()
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
        if stripped:
            child.lines.append(stripped)
            if on_line is not None:
                on_line(child.name, stripped)
    child.process.stderr.close()
