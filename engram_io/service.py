"""The engram process: answers compute's requests for rows through the shared ring.

One thread answers the supervisor (asyncio on uvloop), one hears compute and reads, so that a
request wakes nobody else and a disk that hangs keeps nobody waiting but compute. Requests are
served in the order they came. A read that fails fails its request and nothing else. Started by the
supervisor as
`python -m protocol engram_io.service PIPE PARENT_PID`.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import uvloop
import zmq

from engram_io.broken_disk import BrokenDisk
from engram_io.lookup import DEFAULT_DEPTH, EngramLookup
from engram_io.reader import ReadBlocks
from engram_io.rows import Int64
from engram_io.token_map import TokenMap
from protocol import counters
from protocol.busy_poll import BusyPoll
from protocol.config import ModelConfig
from protocol.control import COMMON, ControlAnswers
from protocol.errors import HeadraceError, ReadError
from protocol.faults import FaultPlan
from protocol.layouts import EngramRing, full_fence
from protocol.lifecycle import describe, run_child
from protocol.messages import (
    EngramFailed,
    EngramReady,
    EngramRequest,
    Hello,
    Loading,
    Ready,
)
from protocol.shards import Shards
from protocol.specs import EngramServiceSpec
from protocol.trace import Tracer
from protocol.transport import Channel
from protocol.wire import Message

NAME = "engram"
# Rows, of all layers, that are read at once: as many reads as a disk takes at its best, two a row.
MOST_TOGETHER = DEFAULT_DEPTH // 2


class EngramService:
    """Owns the ring's contents and the engram endpoint for the life of the process."""

    def __init__(self, spec: EngramServiceSpec, control: Channel, requests: Channel) -> None:
        """Reads what it needs of the checkpoint; raises HeadraceError."""
        self._control = control
        self._requests = requests
        self._tracer = Tracer(NAME, spec.trace)
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._answers = ControlAnswers(control, NAME, self._tracer, self._figures, self._stop.set)
        self._reading = ThreadPoolExecutor(1, "engram-serve")
        # Its thread now: one that cannot be started ends the start, and leaves no request waiting.
        self._reading.submit(os.getpid)
        self._stopping = os.eventfd(0)
        # The reading thread's own, from here on.
        self._waiting: deque[tuple[str, EngramRequest]] = deque()
        # Newest ticket of every ring block: an older one is no longer wanted by anyone.
        self._newest: dict[int, int] = {}
        self._busy_poll = BusyPoll(spec.busy_poll)
        self._failures = 0
        self._report("checkpoint headers", 0.0)
        directory = Path(spec.checkpoint)
        config = ModelConfig.load(directory)
        shards = Shards.open(directory, config)
        self._report("token map", 0.3)
        token_map = TokenMap.load(directory, config)
        self.lookup = EngramLookup(
            config,
            shards,
            token_map,
            depth=max(1, spec.threads),
            cache_bytes=spec.cache_bytes,
            direct=spec.direct,
            on_batch=self._trace_batch,
            wrap_reads=partial(_break_on_request, spec),
        )
        self._ring = EngramRing.attach(spec.ring_fd)
        _check_ring(self._ring, config)

    async def run(self) -> None:
        """Serve until told to stop."""
        self._control.attach(self._loop, self._on_control)
        facts = {
            "engram reads": self.lookup.blocks.way,
            "engram cache": f"{self.lookup.cache.capacity} rows, {self.lookup.cache.nbytes} bytes",
            "token map": f"{self.lookup.token_map.size} classes, "
            f"sha256 {self.lookup.token_map.digest[:12]}",
        }
        reading = self._loop.run_in_executor(self._reading, self._serve_requests)
        self._control.send(Ready(NAME, facts))
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((stop, reading), return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            reading.result()
        os.eventfd_write(self._stopping, 1)
        self._tracer.stop()

    def _report(self, what: str, fraction: float) -> None:
        self._control.send(Loading(NAME, what, fraction))

    # --- the supervisor: the event loop's thread --------------------------------------------------

    def _on_control(self, _sender: str, message: Message) -> None:
        self._answers.take(message)

    def _figures(self) -> dict[str, float]:
        malformed = self._control.malformed + self._requests.malformed
        return {
            **self.lookup.counts,
            counters.READ_FAILURES: self._failures,
            counters.MALFORMED_MESSAGES: malformed,
        }

    # --- compute and the disk: one thread ---------------------------------------------------------

    def _serve_requests(self) -> None:
        """Until told to stop. While a token is decoded it looks for the next one's request."""
        poller = zmq.Poller()
        self._requests.register(poller)
        poller.register(self._stopping, zmq.POLLIN)
        while True:
            at_once = self._waiting or self._busy_poll.look_again()
            events = poller.poll(0 if at_once else None)
            if (self._stopping, zmq.POLLIN) in events:
                return
            if events:
                self._listen()
            if self._waiting:
                self._serve(*self._waiting.popleft())
                self._busy_poll.expect_more()

    def _listen(self) -> None:
        for sender, message in self._requests.drain():
            if isinstance(message, EngramRequest):
                if message.ticket >= 0:
                    self._newest[message.ticket % self._ring.blocks] = message.ticket
                self._waiting.append((sender, message))

    def _serve(self, sender: str, request: EngramRequest) -> None:
        try:
            self._write_rows(sender, request)
        except HeadraceError as error:
            self._failures += isinstance(error, ReadError)
            self._requests.send(EngramFailed(request.ticket, str(error)), sender)
        except Exception as error:
            # Nothing a request holds may end the process that serves the next one.
            self._requests.send(EngramFailed(request.ticket, describe(error)), sender)

    def _write_rows(self, sender: str, request: EngramRequest) -> None:
        ring, ticket, count = self._ring, request.ticket, len(request.tokens)
        if not 0 < count <= ring.block_tokens or ticket < 0:
            raise HeadraceError(
                f"engram request {ticket} of {count} tokens, expected 1 to {ring.block_tokens}"
            )
        rows = self.lookup.rows_of(request.start, request.tokens, request.history)
        # A token's few reads wait at the disk together; of a prompt's many the layer goes first
        # that compute reaches first.
        layers = range(ring.layers)
        together = rows.size <= MOST_TOGETHER
        for indices in (layers,) if together else zip(layers, strict=True):
            self._write_layers(ticket, indices, rows)
            for index in indices:
                self._requests.send(EngramReady(ticket, index), sender)

    def _write_layers(self, ticket: int, indices: Sequence[int], rows: Int64) -> None:
        ring, block, count = self._ring, ticket % self._ring.blocks, rows.shape[1]
        self._listen()
        if self._newest[block] != ticket:
            raise HeadraceError(f"engram request {ticket} gave way to {self._newest[block]}")
        # Who waits asks again; it needs the answer then, and not the rows once more.
        missing = [index for index in indices if ring.ready[block, index] != ticket + 1]
        if missing:
            into = ring.codes[block, :, :count], ring.scales[block, :, :count]
            self.lookup.fill(missing, rows, *into)
            # The words that say so are to be seen after the rows.
            full_fence()
            ring.ready[block, missing] = ticket + 1

    def _trace_batch(
        self, layers: Sequence[int], count: int, nbytes: int, begin_ns: int, end_ns: int
    ) -> None:
        if self._tracer.enabled:
            span = partial(
                self._tracer.complete,
                "engram read",
                begin_ns,
                end_ns,
                layers=list(layers),
                reads=count,
                bytes=nbytes,
            )
            # The tracer belongs to the loop's thread.
            self._loop.call_soon_threadsafe(span)


def _break_on_request(spec: EngramServiceSpec, read: ReadBlocks) -> ReadBlocks:
    if not spec.faults and not spec.latency:
        return read
    return BrokenDisk(read, FaultPlan.parse(spec.faults), spec.latency, max(1, spec.threads))


def _check_ring(ring: EngramRing, config: ModelConfig) -> None:
    expected = (
        len(config.engram_layer_ids),
        config.engram_rows_per_token,
        config.engram_head_dim,
    )
    found = (ring.layers, ring.rows, ring.head_dim)
    if found != expected:
        raise HeadraceError(
            f"engram ring has (layers, rows, columns) {found}, the checkpoint asks for {expected}"
        )


async def _run(spec: EngramServiceSpec) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control = Channel.connect(context, spec.control, NAME, COMMON)
    requests = Channel.bind(context, spec.engram, (EngramRequest,))
    control.send(Hello(NAME, os.getpid(), 0))
    await EngramService(spec, control, requests).run()


def serve(spec: EngramServiceSpec) -> None:
    """The process's whole life."""
    uvloop.run(_run(spec))


if __name__ == "__main__":
    run_child(EngramServiceSpec, serve)
