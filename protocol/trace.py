"""Throughput tracing in the Chrome trace-event format, which Perfetto opens.

Each process writes its own events, one JSON object a line, while tracing is on; the supervisor
joins them with `merge`. Times are CLOCK_MONOTONIC, which all processes of a machine share. Off, a
span costs one attribute test and no clock read.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from protocol.errors import ResourceError

# Events kept before they are formatted and written, so that the hot path only appends.
BUFFERED_EVENTS = 4096

_NOTHING: AbstractContextManager[None] = nullcontext()


class Tracer:
    """Writes one process's spans and counters. `track` separates lanes inside the process."""

    def __init__(self, process: str, path: str = "") -> None:
        self.process = process
        self._events: list[tuple[str, str, int, int, int, dict[str, Any]]] = []
        self._file: TextIO | None = None
        self._tracks: dict[str, int] = {}
        if path:
            self.start(path)

    @property
    def enabled(self) -> bool:
        """Whether events are being kept; test it before computing arguments."""
        return self._file is not None

    def start(self, path: str) -> None:
        """Write to `path` from now on; one that cannot be written, or no longer, is said and not
        traced to."""
        self.stop()
        self._tracks.clear()
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed in stop
        except OSError as error:
            print(f"trace file {path} cannot be written ({error.strerror})", file=sys.stderr)

    def stop(self) -> None:
        """Write what is kept and close the file."""
        if self._file is not None:
            self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """A context manager whose time becomes a span."""
        return _NOTHING if self._file is None else _Span(self, name, args)

    def complete(self, name: str, begin_ns: int, end_ns: int, track: str = "", **args: Any) -> None:
        """A span whose times were taken elsewhere (CLOCK_MONOTONIC nanoseconds)."""
        if self._file is not None:
            self._keep("X", name, begin_ns, end_ns - begin_ns, track, args)

    def counter(self, name: str, **values: float) -> None:
        """A sample of named values at this moment."""
        if self._file is not None:
            self._keep("C", name, time.monotonic_ns(), 0, "", values)

    def _keep(
        self, phase: str, name: str, begin: int, duration: int, track: str, args: dict[str, Any]
    ) -> None:
        number = self._tracks.setdefault(track, len(self._tracks) + 1) if track else 0
        self._events.append((phase, name, begin, duration, number, args))
        if len(self._events) >= BUFFERED_EVENTS:
            self._flush()

    def _flush(self) -> None:
        assert self._file is not None
        pid = os.getpid()
        lines = []
        for phase, name, begin, duration, track, args in self._events:
            length = f', "dur": {duration / 1000}' if phase == "X" else ""
            lines.append(
                f'{{"name": {_quoted(name)}, "ph": "{phase}", "ts": {begin / 1000}{length}, '
                f'"pid": {pid}, "tid": {track}, "args": {_arguments(args)}}}'
            )
        for number, title in self._titles(pid):
            lines.append(json.dumps(number | {"args": {"name": title}}))
        self._events.clear()
        try:
            self._file.write("\n".join(lines) + "\n")
            self._file.flush()
        except OSError as error:
            # A full disk must not end what is being traced.
            print(f"tracing ends: {self._file.name}: {error.strerror}", file=sys.stderr)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _titles(self, pid: int) -> Iterator[tuple[dict[str, Any], str]]:
        yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0}, self.process
        for track, number in self._tracks.items():
            yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": number}, track


class _Span(AbstractContextManager[None]):
    """A span from entry to exit; a generator in its place would cost twice as much."""

    __slots__ = ("_args", "_begin", "_name", "_tracer")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]) -> None:
        self._tracer, self._name, self._args = tracer, name, args

    def __enter__(self) -> None:
        self._begin = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        end = time.monotonic_ns()
        self._tracer.complete(self._name, self._begin, end, **self._args)


@lru_cache(maxsize=256)
def _quoted(name: str) -> str:
    return json.dumps(name)


def _arguments(args: dict[str, Any]) -> str:
    """`args` as JSON. Formatting is most of what tracing costs; nearly all values are counts."""
    if all(type(value) is int for value in args.values()):
        return "{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in args.items()) + "}"
    return json.dumps(args)


def merge(parts: Iterable[Path], output: Path) -> int:
    """Join the processes' files into one trace at `output`; returns the number of events.

    The last line of a process that was killed may be cut; it is left out. Raises ResourceError
    where `output` cannot be written.
    """
    try:
        return _merge(parts, output)
    except OSError as error:
        raise ResourceError(f"{output}: cannot be written ({error.strerror})") from None


def _merge(parts: Iterable[Path], output: Path) -> int:
    count = 0
    seen: set[str] = set()
    with output.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for part in parts:
            with part.open(encoding="utf-8") as lines:
                for line in lines:
                    if line in seen or not line.endswith("\n"):
                        continue
                    if '"ph": "M"' in line:
                        seen.add(line)
                    file.write((",\n" if count else "") + line.rstrip())
                    count += 1
        file.write("\n]}\n")
    return count
