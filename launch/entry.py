"""Where `headrace` and `python launch.py` begin: the command line, imported under a handler.

Loading the libraries takes a good part of a second, in which Ctrl-C must not print a traceback and
a signal must give its documented exit code.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys


def main() -> None:
    """Run the command line; never returns."""
    open_standard_streams()
    # Until a command has something to clear away; a closed terminal that nohup ignores stays so.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, frame: os._exit(128 + number))
    try:
        from launch.cli import main as run
    except KeyboardInterrupt:
        os._exit(130)
    run()


def open_standard_streams() -> None:
    """Where the caller closed one (`2>&-`), the next file opened would take its number, and with it
    whatever is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a terminal's alphabet lacks is shown as a question mark.
        sys.stdout.reconfigure(errors="replace")
    sys.stderr = _StandardError(
        open(2, "wb", closefd=False),  # noqa: SIM115
        sys.stderr.encoding,
        "backslashreplace",
        line_buffering=True,
    )


class _StandardError(io.TextIOWrapper):
    """What cannot be said (a full disk, a pipe that nobody reads) must not end what is being done,
    nor get lost on its way through an event loop."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()
