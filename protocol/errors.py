"""The errors a person sees. Each is one line that says what is wrong, where, and what to do.

Every process ends on a `HeadraceError` with its message on stderr and its `exit_code`, never with
a traceback.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from typing import Literal


class HeadraceError(Exception):
    """Something a person can act on; `str(error)` is the one line shown to them."""

    exit_code = 1


class UsageError(HeadraceError):
    """An option or a request that cannot be carried out as given."""

    exit_code = 2


class CheckpointError(HeadraceError):
    """A checkpoint file that is missing, damaged, or not what its config says."""

    exit_code = 3


class ResourceError(HeadraceError):
    """The machine lacks what was asked for (memory, locked memory, a writable directory)."""

    exit_code = 4


class ProcessDied(HeadraceError):
    """A process of the group ended when it should not have."""

    exit_code = 5


class StallError(HeadraceError):
    """A bounded wait ran out; the message names what was waited for."""

    exit_code = 6


class ReadError(HeadraceError):
    """A tensor's bytes could not be read; the request fails and the engine lives on."""

    exit_code = 7


# What a failed request's `Finished` says failed; "" in one that did not fail.
FailureKind = Literal["", "usage", "checkpoint", "resource", "stall", "read", "internal"]
_FAILURES: dict[FailureKind, type[HeadraceError]] = {
    "usage": UsageError,
    "checkpoint": CheckpointError,
    "resource": ResourceError,
    "stall": StallError,
    "read": ReadError,
}


def failure_kind(error: HeadraceError) -> FailureKind:
    """The word for `error` in a message."""
    return next((kind for kind, of in _FAILURES.items() if isinstance(error, of)), "internal")


def failure(kind: FailureKind, text: str) -> HeadraceError:
    """The error that another process met, with its exit code."""
    return _FAILURES.get(kind, HeadraceError)(text)


# Python's words, and those of a library that panics.
_NO_THREAD = re.compile("can't start new thread|ThreadPoolBuildError")
# The loader's, where a library's file has no room.
_NOT_LOADED = "failed to map segment"


def refused_by_machine(error: BaseException) -> ResourceError | None:
    """What a limit or a full disk made fail anywhere, in words to act on; None for other errors."""
    code = getattr(error, "errno", None)
    if code in (errno.EMFILE, errno.ENFILE):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return ResourceError(f"too many open files; the limit is {soft}, raise it (ulimit -n 4096)")
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        place = getattr(error, "filename", None) or "the output"
        return ResourceError(f"{place}: cannot be written ({os.strerror(code)}); make room for it")
    if code == errno.ENAMETOOLONG:
        place = getattr(error, "filename", None) or "a file"
        return ResourceError(f"{place!s:.60}…: the name is too long for a file; give a shorter one")
    if code == errno.EAGAIN or _NO_THREAD.search(str(error)):
        return ResourceError(
            "no further process or thread can be started; raise the limit (ulimit -u, -v, pids.max)"
        )
    if code == errno.ENOMEM or isinstance(error, MemoryError) or _NOT_LOADED in str(error):
        return ResourceError("memory cannot be had; ask for a smaller --cache, or raise ulimit -v")
    return None
