"""The group's children: started together, watched by pidfd, readers replaced, all ended together.

Owns who lives. Promises: any death is noticed at once (a child that was asked to end is given
`ASKED_TOO_S` to turn out not to have been the only one); a reader that was killed is replaced under
the next incarnation, at most `READER_RESTARTS` times in `RESTART_WINDOW_S`; any other death fails
the group with one line; after `stop` no child is left, at most `STOP_S` later.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable

from launch.child import Child, spawn_child
from launch.memory import available_memory, oom_kills
from launch.options import format_size
from launch.silence import is_stopped
from protocol.errors import HeadraceError, ProcessDied, refused_by_machine
from protocol.specs import reader_name
from protocol.wire import Message

READER_RESTARTS = 5
RESTART_WINDOW_S = 60.0
# Open files or threads that lack for a moment do not end the group for one reader.
ROOM_S = 5.0
ROOM_AGAIN_S = 0.1
# A child told to stop gets a part of the two seconds in which everything has to be over; on a busy
# machine the rest goes into releasing memory and ending the interpreter.
STOP_S = 0.7
# What service managers, shells and closing terminals send, often to every process at once: a child
# may be gone before the supervisor has heard that the whole group is to end.
ASKED_TO_END = (signal.SIGTERM, signal.SIGHUP)
ASKED_TOO_S = 0.5

# module, spec, inherited descriptors
Launch = tuple[str, Message, tuple[int, ...]]


class Processes:
    """The children by name. `describe_reader(reader, incarnation)` says how to start a reader;
    `on_death(error)` is called once, for the first death that ends the group. `budget` is the
    memory in bytes that the group was planned with, for messages."""

    def __init__(
        self,
        describe_reader: Callable[[int, int], Launch],
        on_death: Callable[[HeadraceError], None],
        on_line: Callable[[str, str], None],
        budget: int,
    ) -> None:
        self._describe_reader = describe_reader
        self._on_death = on_death
        self._on_line = on_line
        self._budget = budget
        self._oom_kills = oom_kills()
        self._children: dict[str, Child] = {}
        self._restarts: deque[float] = deque()
        self._stopping = False
        self.readers_replaced = 0

    @property
    def names(self) -> list[str]:
        """Of all that live."""
        return list(self._children)

    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: child.pid for name, child in self._children.items()}

    def start(self, name: str, launch: Launch, incarnation: int = 0) -> None:
        """Start one child and watch it."""
        module, spec, descriptors = launch
        child = spawn_child(
            module, spec, descriptors, name, incarnation=incarnation, on_line=self._on_line
        )
        self._children[name] = child
        asyncio.get_running_loop().add_reader(child.pidfd, self._on_exit, child)

    def start_reader(self, reader: int, incarnation: int = 0) -> None:
        """Start reader number `reader`."""
        launch = self._describe_reader(reader, incarnation)
        self.start(reader_name(reader), launch, incarnation)

    def kill_reader(self, reader: int, incarnation: int) -> None:
        """End a stuck reader; its death then replaces it. An older incarnation is gone already."""
        child = self._children.get(reader_name(reader))
        if child is not None and child.incarnation == incarnation:
            child.kill()

    def kill_silent(self, name: str, seconds: float) -> None:
        """End a process that has given no sign of life for that long."""
        child = self._children.get(name)
        if child is not None:
            stopped = " (it is stopped, as by SIGSTOP)" if is_stopped(child.pid) else ""
            child.kill(f"gave no sign of life for {seconds:g} s{stopped} and was killed")

    async def stop(self) -> None:
        """Wait for children that were told to stop, then end the rest. Safe to call twice."""
        self._stopping = True
        deadline = time.monotonic() + STOP_S
        while self._children and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for child in self._children.values():
            child.kill()
        while self._children:
            await asyncio.sleep(0.005)

    def _on_exit(self, child: Child) -> None:
        asyncio.get_running_loop().remove_reader(child.pidfd)
        code = child.reap()
        del self._children[child.name]
        if -code in ASKED_TO_END:
            asyncio.get_running_loop().call_later(ASKED_TOO_S, self._judge, child, code)
        else:
            self._judge(child, code)

    def _judge(self, child: Child, code: int) -> None:
        """Replace the child that has ended, or end the group for it."""
        if self._stopping:
            return
        error = death_error(child, code, self._budget, oom_kills() > self._oom_kills)
        if child.name.startswith("reader-") and code < 0:
            if self._may_restart():
                self._replace(child, code, error, time.monotonic() + ROOM_S)
                return
            window = f"{READER_RESTARTS + 1} readers within {RESTART_WINDOW_S:.0f} s"
            error = ProcessDied(f"{window} ended, which is no accident; the last: {error}")
        self._end(error)

    def _replace(self, reader: Child, code: int, error: HeadraceError, until: float) -> None:
        """Start its next incarnation; where the machine has no room, try again until `until`."""
        if self._stopping:
            return
        number = int(reader.name.removeprefix("reader-"))
        try:
            self.start_reader(number, reader.incarnation + 1)
        except (HeadraceError, OSError, RuntimeError) as failed:
            refused = refused_by_machine(failed)
            if refused is not None and time.monotonic() < until:
                asyncio.get_running_loop().call_later(
                    ROOM_AGAIN_S, self._replace, reader, code, error, until
                )
                return
            self._end(ProcessDied(f"{error}; it cannot be replaced: {refused or failed}"))
            return
        self.readers_replaced += 1
        self._on_line(reader.name, f"{reader.killed_for or _how(code)}; replaced")

    def _end(self, error: HeadraceError) -> None:
        self._stopping = True
        self._on_death(error)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_WINDOW_S:
            self._restarts.popleft()
        self._restarts.append(now)
        return len(self._restarts) <= READER_RESTARTS


def death_error(child: Child, code: int, budget: int, out_of_memory: bool) -> HeadraceError:
    """Why the group ends when `child` did: its own words where it had an error of its own.
    `out_of_memory`: the kernel has killed someone for that since the start."""
    if child.killed_for:
        return ProcessDied(
            f"{child.name} {child.killed_for}; where it only needs longer, --silence-timeout allows"
        )
    words = child.last_words()
    if code > 1 and child.error:
        error = HeadraceError(child.error)
        error.exit_code = code
        return error
    reason = f": {words}" if words else ""
    if code == -signal.SIGKILL:
        # Whoever sent that did not ask; what the child said before is about something else.
        reason = f" ({_memory_ran_out(budget)})" if out_of_memory else ""
    return ProcessDied(f"{child.name} ended: {_how(code)}{reason}")


def _memory_ran_out(budget: int) -> str:
    planned, free = format_size(budget), format_size(available_memory())
    return (
        f"the kernel was out of memory: cache and dense weights were to take {planned}, {free} are "
        "free now; ask for a smaller --cache"
    )


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
