"""A reader process: takes one read order at a time and preadvs it straight into the arena.

Promises: writes only where an order says, between its arrival and its answer; every order is
answered; between two steps of one it heeds a word to stop; a NaN among the scales fails the read,
since it would poison every later token. Started by the supervisor as
`python -m protocol expert_io.reader PIPE PARENT_PID`.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import zmq

from expert_io.disk import ShardFiles
from protocol.busy_poll import BusyPoll
from protocol.control import COMMON, ControlAnswers
from protocol.early_copies import EarlyReceiver
from protocol.errors import HeadraceError, ReadError
from protocol.faults import Fault, FaultPlan
from protocol.layouts import PAGE, Arena, EarlyOrders, full_fence
from protocol.lifecycle import run_child
from protocol.messages import (
    BACKGROUND,
    LANE_NAMES,
    Hello,
    ReadDone,
    ReaderHello,
    ReadFailed,
    ReadOrder,
    ReadStopped,
    Ready,
    ReviseOrder,
)
from protocol.specs import ReaderSpec, reader_name
from protocol.trace import Tracer
from protocol.transport import Channel

NAN_SCALE = 255
WAIT_S = 3600.0
WAIT_MS = int(WAIT_S * 1000)


class Reader:
    """Owns the slot of the order at hand, from its arrival to its answer."""

    def __init__(self, spec: ReaderSpec, control: Channel, orders: Channel) -> None:
        self._spec = spec
        self._name = reader_name(spec.reader)
        self._control = control
        self._orders = orders
        self._tracer = Tracer(self._name, spec.trace)
        self._answers = ControlAnswers(control, self._name, self._tracer, self._figures, self._stop)
        self._stopping = False
        self._waiting: deque[ReadOrder] = deque()
        self._revision: ReviseOrder | None = None  # the last one
        self._busy_poll = BusyPoll(spec.busy_poll)
        self._faults = FaultPlan.parse(spec.faults, seed=spec.reader)
        self._struck: list[Fault] = []
        self._files = ShardFiles(spec.files, spec.direct, self._preadv)
        self._arena = Arena.attach(spec.arena_fd)
        early = EarlyOrders.attach(spec.early_orders_fd)
        self._early = EarlyReceiver(
            early.of_reader[spec.reader], ReadOrder, attrgetter("order"), spec.incarnation
        )
        self._memory = memoryview(self._arena.memory)[PAGE:]
        self._bytes = 0.0
        self._reads = 0.0

    def run(self) -> None:
        """Serve until told to stop."""
        poller = zmq.Poller()
        self._control.register(poller)
        self._orders.register(poller)
        way = "O_DIRECT" if self._files.direct else "buffered, page cache dropped"
        if self._spec.direct and not self._files.direct:
            way += " (the file system does not take O_DIRECT)"
        if self._spec.bandwidth or self._spec.latency:
            way += "; disk emulated" + _emulation(self._spec)
        self._control.send(Ready(self._name, {"expert reads": way}))
        self._orders.send(ReaderHello(self._spec.reader, self._spec.incarnation, os.getpid()))
        while not self._stopping:
            self._waiting.extend(self._early.look())
            if not self._waiting and not poller.poll(self._patience_ms()):
                continue
            self._serve_waiting()
            self._listen()
            for _, message in self._control.drain():
                self._answers.take(message)
        self._tracer.stop()

    def _listen(self) -> None:
        """Take in what the service has sent, or is about to."""
        self._waiting.extend(self._early.look())
        for _, message in self._orders.drain():
            match message:
                case ReadOrder() if not self._early.has_had(message):
                    self._waiting.append(message)
                case ReviseOrder():
                    self._revision = message

    def _patience_ms(self) -> int:
        """How long to wait for a message: not at all while more is likely."""
        return 0 if self._busy_poll.look_again() else WAIT_MS

    def _serve_waiting(self) -> None:
        """Serve what waits and, before anything is listened to, what has been shown meanwhile:
        mostly the next piece of the same expert."""
        for _ in range(2):
            while self._waiting:
                order = self._waiting.popleft()
                self._serve(order)
                # Nobody waits for what is read in the background, nor for what comes after it.
                if order.lane != BACKGROUND:
                    self._busy_poll.expect_more()
            self._waiting.extend(self._early.look())

    def _stop(self) -> None:
        self._stopping = True

    def _figures(self) -> dict[str, float]:
        malformed = self._control.malformed + self._orders.malformed + self._early.malformed
        return {"reads": self._reads, "read_bytes": self._bytes, "malformed_messages": malformed}

    def _serve(self, order: ReadOrder) -> None:
        begin = time.monotonic_ns()
        who = (self._spec.reader, self._spec.incarnation, order.order)
        nbytes = 0
        try:
            nbytes = self._read(order)
        except HeadraceError as error:
            self._orders.send(ReadFailed(*who, str(error)))
            return
        finally:
            end = time.monotonic_ns()
            self._tracer.complete(
                f"read {LANE_NAMES[order.lane]}" if 0 <= order.lane < 3 else "read",
                begin,
                end,
                layer=order.layer,
                expert=order.expert,
                bytes=nbytes,
            )
        self._bytes += nbytes
        if nbytes < order.needed:
            self._orders.send(ReadStopped(*who, nbytes, (end - begin) / 1e9))
            return
        self._reads += 1
        # Compute, which waits, looks here itself: the message takes several wake-ups to reach it.
        full_fence()
        self._arena.landed[order.slot, order.piece] = order.generation
        self._orders.send(ReadDone(*who, (end - begin) / 1e9))

    def _read(self, order: ReadOrder) -> int:
        """Bytes that were read: all that are needed, or fewer where told to stop."""
        end = order.arena_offset + order.length
        if not (
            0 <= order.arena_offset < end <= len(self._memory)
            and 0 <= order.file < len(self._spec.files)
            and order.offset >= 0
            and 0 < order.needed <= order.length
            and order.step > 0
            and 0 <= order.slot < self._arena.slots
            and 0 <= order.piece < self._arena.pieces
            and len(order.scales) % 2 == 0
            and all(order.arena_offset <= at <= end for at in order.scales)
        ):
            raise ReadError(f"read order {order.order} points outside the arena or the files")
        begin = time.monotonic()
        self._struck = self._faults.strike(order.layer, order.expert)
        self._break()
        memory = self._memory[order.arena_offset : end]
        at, step = 0, order.step
        while at + step < order.length:
            self._files.read(order.file, order.offset + at, step, memory[at : at + step])
            self._emulate_disk(step, begin)
            begin = time.monotonic()
            at += step
            self._listen()
            revision = self._revision
            if revision is not None and revision.order == order.order:
                if revision.stop:
                    return at
                step = order.length - at
        self._files.read(order.file, order.offset + at, order.needed - at, memory[at:])
        self._check_scales(order)
        self._emulate_disk(order.length - at, begin)
        return order.needed

    def _check_scales(self, order: ReadOrder) -> None:
        flat = self._arena.data.reshape(-1)
        for begin, end in zip(order.scales[::2], order.scales[1::2], strict=True):
            if begin < end and np.max(flat[begin:end]) == NAN_SCALE:
                at = order.offset - order.arena_offset + begin
                raise ReadError(
                    f"{self._spec.files[order.file]}: a scale in the {end - begin} bytes at offset "
                    f"{at} is not a number (byte 255); fetch the file again"
                )

    # --- breaking it on purpose -------------------------------------------------------------------

    def _preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """os.preadv, or what a fault makes of it."""
        for fault in self._struck:
            if fault.action == "eio":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if fault.action == "short":
                return 0
        return os.preadv(descriptor, buffers, offset)

    def _break(self) -> None:
        """Delays, deaths and hangs that a fault plan asks for."""
        for fault in self._struck:
            if fault.action == "die":
                os.abort()
            if fault.action == "hang":
                time.sleep(WAIT_S)
            if fault.action == "delay":
                time.sleep(self._faults.delay(fault))

    def _emulate_disk(self, nbytes: int, begin: float) -> None:
        """Take as long as the emulated disk would, all readers sharing its bandwidth."""
        spec = self._spec
        seconds = spec.latency
        if spec.bandwidth:
            seconds += nbytes * spec.readers / spec.bandwidth
        left = begin + seconds - time.monotonic()
        if left > 0:
            time.sleep(left)


def _emulation(spec: ReaderSpec) -> str:
    bandwidth = f" {spec.bandwidth / 1e9:g} GB/s" if spec.bandwidth else ""
    return bandwidth + (f" {spec.latency * 1e6:g} us a read" if spec.latency else "")


def serve(spec: ReaderSpec) -> None:
    """The process's whole life."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    name = reader_name(spec.reader)
    control = Channel.connect(context, spec.control, name, COMMON)
    orders = Channel.connect(context, spec.orders, name, (ReadOrder, ReviseOrder))
    control.send(Hello(name, os.getpid(), spec.incarnation))
    Reader(spec, control, orders).run()


if __name__ == "__main__":
    run_child(ReaderSpec, serve)
