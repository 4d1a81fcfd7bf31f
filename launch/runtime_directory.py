"""The group's private directory: its sockets, its traces, and nothing that outlives it.

Promises: mode 0700, a fresh name every run, removed at the end; directories of groups that were
killed are swept at the next start. Its lock is held for the group's life and vanishes with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from launch.user_directories import temporary_directory
from protocol.errors import ResourceError
from protocol.transport import Endpoints

PREFIX = "headrace-"
LOCK_NAME = "lock"


class RuntimeDirectory:
    """A directory under `base` (or XDG_RUNTIME_DIR, or the temporary directory)."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.endpoints = Endpoints.under(path)

    @classmethod
    def create(cls, base: Path | None = None) -> Self:
        """Raises ResourceError where `base` cannot be written or is too deep for a socket."""
        elsewhere = "in XDG_RUNTIME_DIR" if base is None else "with --runtime-dir"
        parent = base or Path(os.environ.get("XDG_RUNTIME_DIR") or temporary_directory())
        path = None
        try:
            sweep(parent)
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            lock = os.open(path / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            raise ResourceError(
                f"{parent}: cannot make a runtime directory there ({error.strerror}); "
                f"give a writable one {elsewhere}"
            ) from None
        try:
            return cls(path, lock)
        except ValueError as error:
            os.close(lock)
            shutil.rmtree(path, ignore_errors=True)
            raise ResourceError(f"{error}; give a shorter one {elsewhere}") from None

    def remove(self) -> None:
        """Delete it and everything in it; harmless where it is gone."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(parent: Path) -> None:
    """Remove what groups left in `parent` that no longer live."""
    for path in parent.glob(f"{PREFIX}*"):
        # Another user's directory, or one being made or removed at this moment, is left alone.
        with contextlib.suppress(OSError):
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
