"""The whole process group as the tests use it: inside the test's process, or as a command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from launch.group import Event, ProcessGroup
from launch.options import GenerateOptions, GroupOptions
from protocol.messages import Finished, TokenEvent

REPOSITORY = Path(__file__).parents[2]
MINI = REPOSITORY / "tests" / "golden" / "data" / "mini"
# Of the mini checkpoint: 8 layers, top-3 of 16 experts.
MINIMUM_SLOTS = 30
ALL_SLOTS = 8 * 16 + 6
# Every wait of a test ends; how long it may take on a busy machine is another matter.
PATIENCE_S = 40.0
# What the project promises about the end of a group.
END_S = 2.0

T = TypeVar("T")


class RunningGroup:
    """A started ProcessGroup behind plain calls: `with RunningGroup(slots=30) as group`.

    Its event loop runs inside the calls only. Unset options are the smallest that work.
    """

    def __init__(self, checkpoint: Path = MINI, **options: Any) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="hr-"))
        defaults = {
            "slots": MINIMUM_SLOTS,
            "readers": 1,
            "threads": 1,
            "start_timeout": PATIENCE_S,
            "runtime_dir": self._base,
        }
        self.lines: list[tuple[str, str]] = []
        self.options = GroupOptions(checkpoint, **{**defaults, **options})
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        try:
            self.group = ProcessGroup(self.options, lambda *line: self.lines.append(line))
            self.run(self.group.start())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run(self.group.stop())
        self._close()

    def run(self, work: Awaitable[T], seconds: float = PATIENCE_S) -> T:
        """Let the loop run until `work` is done."""

        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await work

        return self._runner.run(bounded())

    def events(self, prompt: Sequence[int], max_tokens: int, **request: Any) -> list[Event]:
        """All events of one request, end-of-sequence ignored."""
        return self.run(collect(self.open(prompt, max_tokens, **request)))

    def open(self, prompt: Sequence[int], max_tokens: int, **request: Any) -> AsyncIterator[Event]:
        """A request whose events the caller takes one by one, with `self.run(anext(…))`."""
        options = GenerateOptions(
            list(prompt), max_tokens=max_tokens, **{"ignore_eos": True, **request}
        )
        return self.group.generate(options)

    def tokens(self, prompt: Sequence[int], max_tokens: int, **request: Any) -> list[int]:
        """The tokens of a request that has to succeed."""
        events = self.events(prompt, max_tokens, **request)
        end = events[-1]
        assert isinstance(end, Finished) and end.reason == "length", end
        return tokens_of(events)

    def stats(self) -> dict[str, dict[str, float]]:
        return self.run(self.group.stats())

    def _close(self) -> None:
        self._runner.close()
        shutil.rmtree(self._base, ignore_errors=True)


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    """Every event of a request."""
    return [event async for event in events]


def _heed_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has taken, whatever else the machine was busy with."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_bytes(pid: int) -> int:
    """Memory of a process that no other one shares."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def tokens_of(events: Sequence[Event]) -> list[int]:
    """The sampled tokens among `events`."""
    return [event.token for event in events if isinstance(event, TokenEvent)]


class Command:
    """`headrace …` as a process of its own, in a process group of its own, as a shell starts it.

    Its children and shared memory are noted by `look`, so that a test can tell later whether
    anything of them is left.
    """

    def __init__(self, *arguments: str, runtime_dir: Path | None = None) -> None:
        self.runtime = runtime_dir or Path(tempfile.mkdtemp(prefix="hr-"))
        self._owns_runtime = runtime_dir is None
        self._arguments = (*arguments, "--runtime-dir", str(self.runtime))
        self._pidfds: dict[str, int] = {}
        self._memory: set[int] = set()
        self.children: dict[str, int] = {}
        self.lines: list[str] = []
        self._heard = 0
        self._kept = b""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "launch.py", *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            # Under nohup it would inherit that a closed terminal is ignored.
            preexec_fn=_heed_hangups,
            bufsize=0,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        if self._owns_runtime:
            shutil.rmtree(self.runtime, ignore_errors=True)

    def await_line(self, part: str) -> str:
        """Read stderr up to the next line that contains `part`."""
        while True:
            while self._heard < len(self.lines):
                self._heard += 1
                if part in self.lines[self._heard - 1]:
                    return self.lines[self._heard - 1]
            assert self._hear_more(), f"no line with {part!r} among {self.lines}"

    def await_text(self) -> bytes:
        """Wait for the first bytes of the model's text."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, f"no text; stderr said {self.lines}"
        return os.read(self.process.stdout.fileno(), 4096)

    def look(self) -> None:
        """Note which children live now, by name, and which shared memory they hold."""
        for pid in children_of(self.process.pid):
            name = child_name(pid)
            if name and self.children.get(name) != pid:
                self.children[name] = pid
                self._pidfds[f"{name} {pid}"] = os.pidfd_open(pid)
            self._memory |= memory_of(pid)

    def end(self, seconds: float = PATIENCE_S) -> tuple[int, float]:
        """Wait for the end; the exit code and how long it took from now."""
        begin = time.monotonic()
        code = self.process.wait(seconds)
        took = time.monotonic() - begin
        while self._hear_more():
            pass
        return code, took

    def said(self) -> list[str]:
        """Lines on stderr after the group was ready or, without that, all but progress."""
        for index, line in enumerate(self.lines):
            if line.startswith("ready in"):
                return self.lines[index + 1 :]
        return [line for line in self.lines if line.startswith("headrace: ")]

    def nothing_left(self, within: float = 0.0) -> None:
        """Fail where a child, a shared memory or a runtime directory outlives the command."""
        deadline = time.monotonic() + within
        for name, descriptor in self._pidfds.items():
            left = max(0.0, deadline - time.monotonic())
            assert select.select([descriptor], [], [], left)[0], f"{name} lives on"
        held = {memory for pid in all_pids() for memory in memory_of(pid)}
        assert self._memory and not self._memory & held
        assert list(self.runtime.iterdir()) == []

    def _hear_more(self) -> bool:
        """Take in what stderr has to say next; whether the stream goes on."""
        assert self.process.stderr is not None
        assert select.select([self.process.stderr], [], [], PATIENCE_S)[0], self.lines
        block = os.read(self.process.stderr.fileno(), 1 << 16)
        *whole, self._kept = (self._kept + block).split(b"\n")
        self.lines.extend(line.decode().rstrip() for line in whole)
        return bool(block)


def children_of(pid: int) -> list[int]:
    """Process ids of the children of all threads of `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ended in this moment
            found += map(int, (task / "children").read_text().split())
    return found


def child_name(pid: int) -> str:
    """The module that a child of the group runs, or nothing."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[3].decode() if words[1:3] == [b"-m", b"protocol"] else ""


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def memory_of(pid: int) -> set[int]:
    """Inodes of the group's shared memory that a process holds open."""
    found: set[int] = set()
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(path).startswith("/memfd:headrace-"):
                    found.add(path.stat().st_ino)
            except OSError:
                continue  # closed in this moment
    except OSError:
        return found  # ended in this moment
    return found


def killed(pid: int) -> None:
    """End a process as the kernel's out-of-memory killer does."""
    os.kill(pid, signal.SIGKILL)
