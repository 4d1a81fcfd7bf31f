"""The process group as its users see it: start it, generate, ask for figures, trace, stop.

Owns the shared memory, the runtime directory and the control socket. Promises: `start` returns when
every process serves, or raises one HeadraceError and leaves nothing behind; a death ends every
request at once with that error; `stop` leaves no process, socket or shared memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import zmq
from tokenizers import Tokenizer

from engram_io.token_map import load_tokenizer
from expert_io.packed import expert_slices
from launch.memory import MemoryPlan, plan_memory
from launch.options import GenerateOptions, GroupOptions
from launch.processes import Processes
from launch.runtime_directory import RuntimeDirectory
from launch.silence import Silence
from launch.warm_options import check_pinned
from launch.wiring import Regions, Wiring
from protocol.config import ModelConfig
from protocol.errors import HeadraceError, ProcessDied, StallError, UsageError
from protocol.layouts import Arena, Directory
from protocol.messages import (
    Cancel,
    Finished,
    Generate,
    Hello,
    Loading,
    PrefillProgress,
    ReaderStuck,
    Ready,
    StatsReply,
    StatsRequest,
    Stop,
    TokenEvent,
    TraceStart,
    TraceStop,
    TraceStopped,
)
from protocol.shards import Shards
from protocol.specs import reader_name
from protocol.trace import merge
from protocol.transport import Channel, require_threads
from protocol.wire import MalformedMessage, Message, decode

Event = PrefillProgress | TokenEvent | Finished
# on_progress(process, what, fraction): how far the start has come.
OnProgress = Callable[[str, str, float], None]

ACCEPTS = (
    Hello,
    Loading,
    Ready,
    ReaderStuck,
    StatsReply,
    TraceStopped,
    PrefillProgress,
    TokenEvent,
    Finished,
)
ANSWER_TIMEOUT_S = 5.0
# No request has this number: any answer is a sign of life, and nobody waits for it.
SIGN_OF_LIFE = -1


class ProcessGroup:
    """One checkpoint being served. Use inside one running event loop.

    After `start`: `config`, `tokenizer`, `plan` (memory), `facts` (what the processes found out,
    for the summary), `directory` (the shared residency directory, read only here).
    """

    def __init__(
        self,
        options: GroupOptions,
        on_line: Callable[[str, str], None] = lambda name, line: None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`on_line(process, line)` gets what children write to stderr, from another thread;
        `tokenizer` is the checkpoint's, where it has been read already."""
        self.options = options
        self.config = ModelConfig.load(options.checkpoint)
        self.shards = Shards.open(options.checkpoint, self.config)
        self.tokenizer = tokenizer or load_tokenizer(options.checkpoint, self.config)
        self.facts: dict[str, str] = {}
        self.failure: HeadraceError | None = None
        self._on_line = on_line
        self._on_progress: OnProgress = lambda process, what, fraction: None
        self._requests: dict[int, asyncio.Queue[Event]] = {}
        self._next_request = 0
        self._stats: dict[int, dict[str, dict[str, float]]] = {}
        self._changed = asyncio.Event()
        self._ready: set[str] = set()
        self._traced: set[str] = set()
        self._trace_number = 0
        self._silence = Silence(options.silence_timeout)
        self._watching: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Start every process and wait until all serve. Raises HeadraceError."""
        if on_progress is not None:
            self._on_progress = on_progress
        slices = expert_slices(
            self.options.checkpoint, self.config, self.options.pack, self.options.piece_bytes
        )
        self.plan: MemoryPlan = plan_memory(self.config, self.options, slices.slot_bytes)
        check_pinned(self.options.pinned, self.config, self.plan.slots)
        require_threads()
        self._runtime = RuntimeDirectory.create(self.options.runtime_dir)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._regions: Regions | None = None
        try:
            self._control = Channel.bind(self._context, self._runtime.endpoints.control, ACCEPTS)
            self._regions = Regions.allocate(
                self.config, self.options, self.plan, slices.most_pieces
            )
            self.facts["expert memory"] = _pages_of(self._regions.arena)
            self._wiring = Wiring(
                self.config, self.options, self._runtime, self._regions, slices.files
            )
            self._processes = Processes(
                self._wiring.reader, self._fail, self._on_line, self.plan.memory_bytes
            )
            self._control.attach(asyncio.get_running_loop(), self._on_message)
            for name, launch in self._wiring.services().items():
                self._processes.start(name, launch)
            for reader in range(self.options.readers):
                self._processes.start_reader(reader)
            expected = set(self._processes.names)
            await self._until(
                lambda: self._ready >= expected,
                self.options.start_timeout,
                lambda: f"start of {', '.join(sorted(expected - self._ready))}",
            )
            self._watching = asyncio.create_task(self._watch())
        except BaseException:
            await self.stop()
            raise

    @property
    def endpoints(self) -> str:
        """The runtime directory, for messages."""
        return str(self._runtime.path)

    @property
    def directory(self) -> Directory:
        """The shared residency directory."""
        assert self._regions is not None
        return self._regions.directory

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children by name."""
        return self._processes.pids()

    async def generate(self, options: GenerateOptions) -> AsyncGenerator[Event, None]:
        """Run one request; the last event is Finished. Leaving the iterator early cancels it.

        Raises UsageError for a request too large to send, HeadraceError when the group died.
        """
        self._raise_failure()
        request, self._next_request = self._next_request, self._next_request + 1
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._requests[request] = queue
        finished = False
        try:
            self._send_generate(request, options)
            while not finished:
                event = await self._next_event(queue)
                finished = isinstance(event, Finished)
                yield event
        finally:
            del self._requests[request]
            if not finished and not self._stopped:
                self.cancel(request)

    def cancel(self, request: int) -> None:
        """End a request after the token at hand; its iterator then yields Finished."""
        self._control.send(Cancel(request), to="compute")

    async def stats(self) -> dict[str, dict[str, float]]:
        """Counters of every process that answers, by process name."""
        self._raise_failure()
        request, self._next_request = self._next_request, self._next_request + 1
        answers = self._stats.setdefault(request, {})
        names = set(self._processes.names)
        for name in names:
            self._control.send(StatsRequest(request), to=name)
        try:
            await self._until(lambda: answers.keys() >= names, ANSWER_TIMEOUT_S, lambda: "stats")
        except StallError:
            # A process busy for longer than that answers next time; the others' figures stand.
            pass
        finally:
            del self._stats[request]
        supervisor = {
            "readers_replaced": float(self._processes.readers_replaced),
            "malformed_messages": float(self._control.malformed),
        }
        return {**answers, "supervisor": supervisor}

    async def trace_start(self) -> None:
        """Have every process write trace events from now on."""
        self._trace_number += 1
        for name in self._processes.names:
            self._control.send(TraceStart(str(self._trace_part(name))), to=name)

    async def trace_stop(self, output: Path) -> int:
        """End tracing and join the processes' events in `output`; returns their number."""
        self._traced.clear()
        names = set(self._processes.names)
        for name in names:
            self._control.send(TraceStop(), to=name)
        await self._until(lambda: self._traced >= names, ANSWER_TIMEOUT_S, lambda: "trace")
        parts = sorted(self._runtime.path.glob(f"trace-{self._trace_number}-*"))
        return await asyncio.to_thread(merge, parts, output)

    async def stop(self) -> None:
        """End everything within two seconds. Safe to call twice, and to cancel: a second Ctrl-C
        must not leave behind what the first had begun to clear away."""
        if not self._stopped:
            self._stopped = True
            self._ending = asyncio.ensure_future(self._end())
        cancelled = False
        while not self._ending.done():
            try:
                await asyncio.shield(self._ending)
            except asyncio.CancelledError:
                cancelled = True
        self._ending.result()
        if cancelled:
            raise asyncio.CancelledError

    async def _watch(self) -> None:
        """End who gives no sign of life: compute does so between layers, the others at any time."""
        self._silence.begin(time.monotonic())
        while True:
            await asyncio.sleep(self._silence.pause)
            pids = self._processes.pids()
            for name in self._silence.look(pids, time.monotonic()):
                self._processes.kill_silent(name, self._silence.bound)
            for name in pids:
                self._control.send(StatsRequest(SIGN_OF_LIFE), to=name)

    async def _end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if hasattr(self, "_processes"):
            for name in self._processes.names:
                self._control.send(Stop(), to=name)
            await self._processes.stop()
        if hasattr(self, "_control"):
            self._control.close()
        self._context.destroy(linger=0)
        self._runtime.remove()
        if self._regions is not None:
            self._regions.close()
        self._changed.set()

    def _trace_part(self, name: str) -> Path:
        return self._runtime.path / f"trace-{self._trace_number}-{name}.jsonl"

    def _send_generate(self, request: int, options: GenerateOptions) -> None:
        message = options.message(request)
        try:
            # What compute would drop as malformed would be waited for without end.
            decode(message.encode(), (Generate,))
            sent = self._control.send(message, to="compute")
        except MalformedMessage as error:
            raise UsageError(f"the request cannot be sent: {error}") from None
        if not sent:
            raise ProcessDied("compute does not take requests; it is starting or gone")

    async def _next_event(self, queue: asyncio.Queue[Event]) -> Event:
        while queue.empty():
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()
        return queue.get_nowait()

    def _on_message(self, sender: str, message: Message) -> None:
        self._silence.heard(sender)
        match message:
            case Loading(process, what, fraction):
                self._on_progress(process, what, fraction)
            case Ready(process, facts):
                self._ready.add(process)
                self.facts.update(facts)
                self._on_progress(process, "ready", 1.0)
            case ReaderStuck(reader, incarnation, seconds):
                self._on_line(reader_name(reader), f"no answer for {seconds:.0f} s; replacing it")
                self._processes.kill_reader(reader, incarnation)
            case StatsReply(request, process, found):
                if request in self._stats:
                    self._stats[request][process] = found
            case TraceStopped(process):
                self._traced.add(process)
            case PrefillProgress() | TokenEvent() | Finished():
                if message.request in self._requests:
                    self._requests[message.request].put_nowait(message)
        self._changed.set()

    def _fail(self, error: HeadraceError) -> None:
        self.failure = error
        self._changed.set()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._stopped:
            raise ProcessDied("the group has been stopped")

    async def _until(
        self, holds: Callable[[], bool], seconds: float, name: Callable[[], str]
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    self._raise_failure()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise StallError(f"{name()}: no answer within {seconds:g} s") from None


def _pages_of(arena: Arena) -> str:
    """What kind of pages hold it, for the summary."""
    share = arena.huge_bytes / arena.nbytes
    return "huge pages" if share > 0.9 else "small pages" if share == 0 else "some huge pages"
