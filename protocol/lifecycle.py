"""How a child process begins and ends, the same for all of them.

Promises: a child ends by itself when its parent does, however that dies; Ctrl-C in the terminal is
the parent's to handle; an error is one line on stderr and the error's exit code.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

from protocol.errors import HeadraceError, refused_by_machine
from protocol.specs import SPECS
from protocol.transport import require_threads
from protocol.wire import MalformedMessage, Message, decode

SPEC_TIMEOUT_S = 10.0
DEBUG_VARIABLE = "HEADRACE_DEBUG"
# Begins the line on stderr that says why a child ends, and no other.
LAST_WORDS = "error: "
_PR_SET_PDEATHSIG = 1

S = TypeVar("S", bound=Message)


def run_child(kind: type[S], serve: Callable[[S], None]) -> NoReturn:
    """Run `serve(spec)` as the whole life of `python -m protocol MODULE PIPE PARENT_PID`.

    PIPE is the inherited read end of a pipe: first a 4-byte little-endian length and the spec's
    frame, then nothing until the parent ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGTERM's default ends the process at once, and there is nothing here to clean up.
    try:
        if len(sys.argv) != 3 or not (sys.argv[1] + sys.argv[2]).isdigit():
            raise HeadraceError("headrace starts this module, not a person; see headrace --help")
        pipe = int(sys.argv[1])
        _die_with_parent(int(sys.argv[2]))
        spec = _read_spec(pipe, kind)
        threading.Thread(
            target=_watch_parent, args=(pipe,), daemon=True, name="parent-watch"
        ).start()
        require_threads()
        serve(spec)
    except BaseException as error:  # a library's panic is no Exception
        end_child(error)
    end_child(None)


def end_child(error: BaseException | None) -> NoReturn:
    """End this process, with `error` as its last words and its exit code."""
    code = 0
    if isinstance(error, HeadraceError):
        print(f"{LAST_WORDS}{error}", file=sys.stderr)
        code = error.exit_code
    elif error is not None:
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exception(error)
        refused = refused_by_machine(error)
        print(f"{LAST_WORDS}{refused or describe(error)}", file=sys.stderr)
        code = refused.exit_code if refused else 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter shutdown would wait for reader threads and destroy CUDA state at length.
    os._exit(code)


def describe(error: BaseException) -> str:
    """One line for an error nobody foresaw: what, where, and how to see more."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())
    return (
        f"internal error: {type(error).__name__}: {text}{where}; "
        f"{DEBUG_VARIABLE}=1 shows the traceback"
    )


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before the call is no longer signalled.
    if os.getppid() != parent:
        os._exit(1)


def _read_spec(pipe: int, kind: type[S]) -> S:
    length = int.from_bytes(_read_exactly(pipe, 4), "little")
    if length > kind.MAX_BYTES:
        raise HeadraceError(f"start message of {length} bytes, more than {kind.MAX_BYTES}")
    try:
        spec = decode(_read_exactly(pipe, length), SPECS)
    except MalformedMessage as error:
        raise HeadraceError(f"start message: {error}") from None
    if not isinstance(spec, kind):
        raise HeadraceError(f"start message is {type(spec).__name__}, expected {kind.__name__}")
    return spec


def _read_exactly(pipe: int, count: int) -> bytes:
    received = b""
    while len(received) < count:
        if not select.select([pipe], [], [], SPEC_TIMEOUT_S)[0]:
            raise HeadraceError(f"no start message from the parent within {SPEC_TIMEOUT_S:.0f} s")
        block = os.read(pipe, count - len(received))
        if not block:
            raise HeadraceError("the parent ended before its start message")
        received += block
    return received


def _watch_parent(pipe: int) -> None:
    """Blocks until the parent's end of the pipe closes. A second way beside the death signal, which
    is lost where the thread that started this process ends before its process does."""
    while os.read(pipe, 1):
        pass
    os._exit(1)
