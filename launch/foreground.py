"""Running a process group for a person at a terminal: progress while it starts, signals, log lines.

Promises: Ctrl-C, SIGTERM and a closed terminal end everything within two seconds with exit code
130, 143 or 129; what children say on stderr is shown under their name; colours and moving lines
only on a terminal.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvloop
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from tokenizers import Tokenizer

from launch.group import ProcessGroup
from launch.options import GroupOptions, format_size
from protocol.errors import ResourceError

# Where fewer may be open, ZeroMQ ends the process instead of refusing.
LEAST_OPEN_FILES = 64
# A line in a log is one line: only a terminal has a width to wrap at.
console = Console(
    stderr=True, highlight=False, soft_wrap=True, width=None if sys.stderr.isatty() else 160
)


def byte_progress() -> Progress:
    """A bar of bytes done and their rate, under each task's description; only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


# Ctrl-C, an ordinary kill, a closed terminal.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded_signals() -> list[signal.Signals]:
    """Those that end a command; nohup has a closed terminal ignored."""
    return [
        number
        for number in ENDING
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Outside an event loop: a signal becomes SystemExit(128 + number) in whatever is being done.
    Further ones are ignored, since they would stop the clearing away."""
    before = {number: signal.getsignal(number) for number in heeded_signals()}

    def end(number: int, frame: FrameType | None) -> None:
        for every in before:
            signal.signal(every, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, end)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run_foreground(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` to its end or to a signal; a signal becomes SystemExit(128 + number). Raises
    ResourceError where too few files may be open for any group."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < LEAST_OPEN_FILES:
        raise ResourceError(
            f"{allowed} files may be open, expected {LEAST_OPEN_FILES} or more; raise the limit "
            "(ulimit -n 4096)"
        )
    received: list[int] = []

    async def guarded() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def on_signal(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in heeded_signals():
            loop.add_signal_handler(number, on_signal, number)
        await main()

    try:
        uvloop.run(guarded())
    except asyncio.CancelledError:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None


@asynccontextmanager
async def running_group(
    options: GroupOptions, tokenizer: Tokenizer | None = None
) -> AsyncIterator[ProcessGroup]:
    """A started group, with its start shown as it goes; stopped at the end, whatever happens.
    `tokenizer` is the checkpoint's, where it has been read already."""
    group = ProcessGroup(options, show_line, tokenizer)
    begin = time.monotonic()
    with console.status("starting") as status:
        spoken: set[tuple[str, str]] = set()

        def on_progress(process: str, what: str, fraction: float) -> None:
            if console.is_terminal:
                status.update(f"starting: {process}, {what} ({fraction:.0%})")
            elif (process, what) not in spoken and fraction in (0.0, 1.0):
                spoken.add((process, what))
                console.print(f"{process}: {what}")

        await group.start(on_progress)
    plan = group.plan
    console.print(
        f"[dim]ready in {time.monotonic() - begin:.1f} s: {plan.slots} slots for "
        f"{plan.all_experts} experts ({format_size(plan.arena_bytes)} in "
        f"{group.facts['expert memory']}), "
        f"{options.readers} readers ({group.facts.get('expert reads', 'unknown')}), "
        f"{group.facts.get('device', 'unknown device')}[/dim]"
    )
    if options.disk_bandwidth or options.disk_latency:
        console.print("[yellow]the disk is slowed down on purpose; figures are not this machine's")
    try:
        yield group
    finally:
        await group.stop()


def show_line(process: str, line: str) -> None:
    """A child's line on stderr."""
    print(f"{process}: {line}", file=sys.stderr, flush=True)
