"""The expert service: answers compute's demands and hints, gives readers their orders.

Wires `Residency` to three sockets (compute, readers, supervisor) and decides nothing itself. A
malformed or senseless message is counted and dropped. Started by the supervisor as
`python -m protocol expert_io.service PIPE PARENT_PID`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections import defaultdict
from operator import attrgetter
from pathlib import Path

import uvloop
import zmq

from expert_io.dispatch import Dispatcher
from expert_io.packed import expert_slices
from expert_io.policies import make_policy
from expert_io.policy import Key
from expert_io.reads import Order
from expert_io.residency import Outcome, Residency
from expert_io.scheduler import ExpectedGain
from expert_io.service_trace import ServiceTrace
from expert_io.slices import SliceMap
from expert_io.warm_set import WarmSet
from protocol import counters
from protocol.busy_poll import BusyPoll
from protocol.config import ModelConfig
from protocol.control import COMMON, ControlAnswers
from protocol.early_copies import EarlyReceiver, EarlySender
from protocol.errors import CheckpointError, HeadraceError, ResourceError
from protocol.identity import checkpoint_identity
from protocol.layouts import Arena, Directory, EarlyOrders, Progress
from protocol.lifecycle import run_child
from protocol.messages import (
    Demand,
    DemandFailed,
    Hello,
    Hint,
    Landed,
    Loading,
    ReadDone,
    ReaderHello,
    ReaderStuck,
    ReadFailed,
    ReadOrder,
    ReadStopped,
    Ready,
    ReviseOrder,
)
from protocol.specs import ExpertServiceSpec, reader_name
from protocol.trace import Tracer
from protocol.transport import Channel
from protocol.wire import Message

NAME = "experts"
COMPUTE = "compute"
READER_SAYS = (ReaderHello, ReadDone, ReadFailed, ReadStopped)
# Compute's progress sends no message: while a read waits for it, look this often.
PROGRESS_LOOK_S = 0.0005
WATCH_S = 0.25


class ExpertService:
    """One event loop's worth of wiring; every decision is `self.residency`'s."""

    def __init__(self, spec: ExpertServiceSpec, control: Channel) -> None:
        """Reads the shard headers; raises HeadraceError."""
        self._spec = spec
        self._control = control
        self._loop = asyncio.get_running_loop()
        control.send(Loading(NAME, "expert slice map", 0.0))
        directory = Path(spec.checkpoint)
        self._config = ModelConfig.load(directory)
        pack = Path(spec.pack) if spec.pack else None
        slices = expert_slices(directory, self._config, pack, spec.piece_bytes)
        arena, progress = Arena.attach(spec.arena_fd), Progress.attach(spec.progress_fd)
        shared = Directory.attach(spec.directory_fd)
        self._slots, self._slot_bytes = arena.slots, arena.slot_bytes
        _check_geometry(self._config, slices, arena, shared)
        self.residency = Residency(
            slices,
            shared,
            progress,
            make_policy(spec.policy, spec.seed),
            ExpectedGain(),
            reserve=spec.reserve,
            predicted_in_flight=spec.predicted_in_flight,
        )
        self.residency.pin(_keys(spec.pinned))
        self._warm_set, self._warm_settled = self._open_warm_set(), False
        self._background_reads = -1.0
        self.residency.warm(_keys(spec.warm_experts))
        # What was built lives as long as the process; without this every collection walks it.
        gc.freeze()
        self._dispatcher = Dispatcher(self.residency)
        self._incarnations: dict[int, int] = {}
        self._reported: dict[int, float] = {}
        self._own: defaultdict[str, float] = defaultdict(float)
        tracer = Tracer(NAME, spec.trace)
        self._trace = ServiceTrace(tracer, self.residency.figures, self._loop)
        self._looking = False
        self._busy_poll, self._polling = BusyPoll(spec.busy_poll), False
        self._early_demands = EarlyReceiver(progress.demands, Demand, attrgetter("demand"))
        early_orders = EarlyOrders.attach(spec.early_orders_fd)
        self._early_orders = [EarlySender(cells) for cells in early_orders.of_reader]
        self._poller = zmq.Poller()
        self._stop = asyncio.Event()
        self._answers = ControlAnswers(control, NAME, self._trace, self._figures, self._stop.set)

    def _open_warm_set(self) -> WarmSet | None:
        """The hot experts of runs before and of this one; the former are on their way already."""
        if not self._spec.warm_dir:
            return None
        config = self._config
        shape = (config.num_hidden_layers, config.n_routed_experts)
        identity = checkpoint_identity(Path(self._spec.checkpoint))
        warm_set = WarmSet(Path(self._spec.warm_dir), identity, *shape)
        try:
            self.residency.warm(warm_set.load()[: self._slots])
        except CheckpointError as error:
            print(error, file=sys.stderr, flush=True)
        return warm_set

    def _settle_warm_set(self) -> None:
        """Once the warm experts are here: the hottest shall go last, though they came first."""
        background = self.residency.counts[counters.READS_BACKGROUND]
        still_coming, self._background_reads = background != self._background_reads, background
        if self._warm_set is None or self._warm_settled or still_coming:
            return
        self._warm_settled = True
        for key in reversed(self._warm_set.hottest(self._slots)):
            self.residency.policy.used(key)

    def _keep_warm_set(self) -> None:
        if self._warm_set is None:
            return
        try:
            self._warm_set.save(self._slots)
        except ResourceError as error:
            print(error, file=sys.stderr, flush=True)

    async def run(self, compute: Channel, readers: Channel) -> None:
        """Serve until told to stop."""
        self._compute, self._readers = compute, readers
        for channel in (compute, readers):
            channel.register(self._poller)
        self._control.attach(self._loop, self._on_control)
        compute.attach(self._loop, self._on_compute)
        readers.attach(self._loop, self._on_reader)
        while not self._stop.is_set():
            self._watch_readers()
            self._settle_warm_set()
            try:
                await asyncio.wait_for(self._stop.wait(), WATCH_S)
            except TimeoutError:
                continue
        self._keep_warm_set()
        self._trace.stop()

    # --- messages ---------------------------------------------------------------------------------

    def _on_control(self, _sender: str, message: Message) -> None:
        self._answers.take(message)

    def _on_compute(self, sender: str, message: Message) -> None:
        if not isinstance(message, Demand) or not self._early_demands.has_had(message):
            self._take(sender, message)

    def _take(self, sender: str, message: Message) -> None:
        match message:
            case Demand(demand, layer, experts) if self._known(layer, experts):
                self._trace.asked(demand, layer, experts)
                landed = self.residency.demand(demand, layer, experts, time.monotonic())
                if landed:
                    self._compute.send(Landed(demand, landed), to=sender)
                    self._trace.answered(demand, landed)
            case Hint(step, layer, picks, ahead, predicted, scores) if (
                self._known(layer, picks)
                and (not predicted or self._known(ahead, predicted))
                and len(scores) == len(predicted)
            ):
                if self._warm_set is not None:
                    self._warm_set.picked(step, layer, picks)
                now = time.monotonic()
                self.residency.hint(step, layer, picks, ahead, predicted, scores, now)
            case _:
                self._own[counters.MALFORMED_MESSAGES] += 1
        self._give_orders()
        self._expect_more()

    def _expect_more(self) -> None:
        self._busy_poll.expect_more()
        if not self._polling:
            self._poll_next_turn()

    def _poll_next_turn(self) -> None:
        """Keep the loop from sleeping while compute is likely to say more; timers and the
        supervisor have their turns as ever."""
        self._polling = self._busy_poll.look_again()
        if self._polling:
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        for demand in self._early_demands.look():
            self._take(COMPUTE, demand)
        if self._poller.poll(0):
            self._compute.take_in()
            self._readers.take_in()
        self._poll_next_turn()

    def _on_reader(self, sender: str, message: Message) -> None:
        match message:
            case ReaderHello(reader, incarnation, _) if (
                0 <= reader < self._spec.readers and sender == reader_name(reader)
            ):
                self._greet(reader, incarnation)
            case ReadDone(reader, incarnation, number, seconds) if self._holds(
                reader, incarnation, number
            ):
                self._own[counters.READ_SECONDS] += seconds
                self._dispatcher.answered(reader)
                self._report(self.residency.done(number, reader, seconds, time.monotonic()))
            case ReadFailed(reader, incarnation, number, reason) if self._holds(
                reader, incarnation, number
            ):
                self._dispatcher.answered(reader)
                self._report(self.residency.failed(number, reader, reason, time.monotonic()))
            case ReadStopped(reader, incarnation, number, nbytes, seconds) if self._holds(
                reader, incarnation, number
            ) and self._may_stop(number, nbytes):
                self._own[counters.READ_SECONDS] += seconds
                self._dispatcher.answered(reader)
                self._report(self.residency.stopped(number, reader, nbytes, seconds))
            case (
                ReaderHello(reader, incarnation, _)
                | ReadDone(reader, incarnation, _)
                | ReadFailed(reader, incarnation, _)
                | ReadStopped(reader, incarnation, _)
            ) if incarnation < self._incarnations.get(reader, -1):
                pass  # The last words of a reader that has been replaced.
            case _:
                self._own[counters.MALFORMED_MESSAGES] += 1
        self._give_orders()

    def _greet(self, reader: int, incarnation: int) -> None:
        known = self._incarnations.get(reader, -1)
        if incarnation <= known:
            return
        self._incarnations[reader] = incarnation
        self._reported.pop(reader, None)
        if known >= 0:
            self._own[counters.READERS_REPLACED] += 1
            self._report(self.residency.reader_lost(reader))
        self._dispatcher.joined(reader)
        if known < 0 and len(self._incarnations) == self._spec.readers:
            self._control.send(Ready(NAME, {"eviction": self._spec.policy}))

    def _holds(self, reader: int, incarnation: int, number: int) -> bool:
        """Whether this order is in the hands of this incarnation of the reader."""
        order = self.residency.queue.orders.get(number)
        return (
            order is not None
            and order.reader == reader
            and self._incarnations.get(reader) == incarnation
        )

    def _may_stop(self, number: int, nbytes: int) -> bool:
        order = self.residency.queue.orders[number]
        return order.read.given_up and 0 < nbytes < order.piece.needed

    def _known(self, layer: int, experts: list[int]) -> bool:
        return 0 <= layer < self._config.num_hidden_layers and all(
            0 <= expert < self._config.n_routed_experts for expert in experts
        )

    # --- orders -----------------------------------------------------------------------------------

    def _give_orders(self) -> None:
        for order, stop in self.residency.queue.take_revisions():
            self._readers.send(ReviseOrder(order.number, stop), to=reader_name(order.reader))
        for order in self._dispatcher.orders(time.monotonic()):
            self._send_order(order)
        self.residency.refill()
        if self._dispatcher.must_look and not self._looking:
            self._looking = True
            self._loop.call_later(PROGRESS_LOOK_S, self._look_again)

    def _send_order(self, order: Order) -> None:
        piece, read = order.piece, order.read
        base = read.slot * self._slot_bytes
        message = ReadOrder(
            order.number,
            piece.file,
            piece.offset,
            piece.length,
            piece.needed,
            order.step,
            base + piece.slot_offset,
            [base + offset for pair in piece.scales for offset in pair],
            read.slot,
            piece.number,
            read.generation,
            read.lane,
            *read.key,
        )
        # An unreachable reader keeps its order until its replacement says hello.
        frame = message.encode()
        self._early_orders[order.reader].put(frame, self._incarnations[order.reader])
        self._readers.send_frame(frame, to=reader_name(order.reader))

    def _look_again(self) -> None:
        self._looking = False
        self._give_orders()

    def _report(self, outcome: Outcome) -> None:
        if outcome.landed:
            # What compute waited for is there, so it will soon ask for more.
            self._expect_more()
        for demand, expert in outcome.landed:
            self._compute.send(Landed(demand, [expert]), to=COMPUTE)
            self._trace.answered(demand, [expert])
        for demand, expert, reason in outcome.failed:
            self._compute.send(DemandFailed(demand, expert, reason), to=COMPUTE)
            self._trace.answered(demand, [expert])

    # --- what no message brings -------------------------------------------------------------------

    def _watch_readers(self) -> None:
        """Report a reader that holds an order for too long, again while nobody replaces it."""
        now, bound = time.monotonic(), self._spec.order_timeout
        for order in self.residency.queue.orders.values():
            since = max(order.since, self._reported.get(order.reader, 0.0))
            if now - since > bound:
                self._reported[order.reader] = now
                incarnation = self._incarnations[order.reader]
                self._control.send(ReaderStuck(order.reader, incarnation, now - order.since))

    def _figures(self) -> dict[str, float]:
        figures = self.residency.figures() | self._own
        sources = (self._control, self._compute, self._readers, self._early_demands)
        malformed = sum(source.malformed for source in sources)
        figures[counters.MALFORMED_MESSAGES] = malformed + self._own[counters.MALFORMED_MESSAGES]
        return figures


def _keys(words: list[int]) -> list[Key]:
    return [(word >> 16, word & 0xFFFF) for word in words]


def _check_geometry(
    config: ModelConfig, slices: SliceMap, arena: Arena, directory: Directory
) -> None:
    expected = (config.num_hidden_layers, config.n_routed_experts, arena.slots)
    found = (directory.layers, directory.experts, directory.slots)
    if found != expected:
        raise HeadraceError(f"directory of {found} (layers, experts, slots), expected {expected}")
    if arena.slot_bytes < slices.slot_bytes:
        raise HeadraceError(
            f"arena slots of {arena.slot_bytes} bytes, an expert needs {slices.slot_bytes}"
        )
    if arena.pieces < slices.most_pieces:
        raise HeadraceError(
            f"arena for {arena.pieces} pieces an expert, one is read in {slices.most_pieces}"
        )


async def _run(spec: ExpertServiceSpec) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # Bound before anything slow, so that peers that start earlier find it.
    compute = Channel.bind(context, spec.experts, (Demand, Hint))
    readers = Channel.bind(context, spec.readers_endpoint, READER_SAYS)
    control = Channel.connect(context, spec.control, NAME, COMMON)
    control.send(Hello(NAME, os.getpid(), 0))
    await ExpertService(spec, control).run(compute, readers)


def serve(spec: ExpertServiceSpec) -> None:
    """The process's whole life."""
    uvloop.run(_run(spec))


if __name__ == "__main__":
    run_child(ExpertServiceSpec, serve)
