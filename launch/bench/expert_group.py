"""The expert side of the group alone: service and readers, with compute's part left to the caller.

For benchmarks and tests that measure or break reading without a model. Synchronous: the caller is
both supervisor and compute.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import zmq

from expert_io.packed import expert_slices
from expert_io.policies import DEFAULT_POLICY
from launch.child import Child, spawn_child
from launch.processes import death_error
from launch.runtime_directory import RuntimeDirectory
from protocol.busy_poll import busy_poll_seconds
from protocol.config import ModelConfig
from protocol.early_copies import EarlySender
from protocol.errors import ReadError, StallError
from protocol.layouts import ABSENT, Arena, Directory, EarlyOrders, Progress, full_fence
from protocol.messages import (
    Demand,
    DemandFailed,
    Hello,
    Hint,
    Landed,
    Loading,
    ReaderStuck,
    Ready,
    StatsReply,
    StatsRequest,
    Stop,
    TraceStopped,
)
from protocol.specs import ExpertServiceSpec, ReaderSpec, reader_name
from protocol.transport import Channel
from protocol.wire import Message

TIMEOUT_S = 30.0
# Asking after every child is a system call each, too much for a wait that looks every 50 us.
DEATHS_ASKED_S = 0.1
M = TypeVar("M", bound=Message)


def every_expert(config: ModelConfig) -> list[tuple[int, int]]:
    """(layer, expert) of every routed expert, layer after layer."""
    return [
        (layer, expert)
        for layer in range(config.num_hidden_layers)
        for expert in range(config.n_routed_experts)
    ]


class ExpertGroup:
    """Use as a context manager; on entry service and readers are ready for demands."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        slots: int,
        readers: int = 2,
        reserve: int = 2,
        piece_bytes: int = 4 << 20,
        predicted_in_flight: int = 2,
        order_timeout: float = 20.0,
        policy: str = DEFAULT_POLICY,
        direct: bool = True,
        faults: str = "",
        latency: float = 0.0,
        bandwidth: float = 0.0,
        warm: Sequence[tuple[int, int]] = (),
        pack: Path | None = None,
        pinned: Sequence[tuple[int, int]] = (),
        warm_dir: Path | None = None,
        huge_pages: bool = True,
        busy_poll: float | None = None,
    ) -> None:
        """`busy_poll` as in GroupOptions; the caller takes compute's place with one thread."""
        self.checkpoint = checkpoint
        self.config = ModelConfig.load(checkpoint)
        self.slices = expert_slices(checkpoint, self.config, pack, piece_bytes)
        self.pack = pack
        self.readers, self.direct = readers, direct
        self.faults, self.latency, self.bandwidth = faults, latency, bandwidth
        self.piece_bytes, self.predicted_in_flight, self.reserve = (
            piece_bytes,
            predicted_in_flight,
            reserve,
        )
        self.order_timeout, self.policy = order_timeout, policy
        if busy_poll is None:
            busy_poll = busy_poll_seconds(len(os.sched_getaffinity(0)), readers, 1)
        self.busy_poll = busy_poll
        self._warm = [layer << 16 | expert for layer, expert in warm]
        self._pinned = [layer << 16 | expert for layer, expert in pinned]
        self._warm_dir = warm_dir
        self._slots = slots
        self.huge_pages = huge_pages
        self.children: dict[str, Child] = {}
        self.demands = 0
        self._deaths_asked = 0.0

    def __enter__(self) -> Self:
        # Whatever interrupts the start, what has been begun is undone.
        with ExitStack() as undo:
            self._runtime = RuntimeDirectory.create()
            undo.callback(self._runtime.remove)
            self.endpoints = self._runtime.endpoints
            self.arena = Arena.create(
                slots=self._slots,
                slot_bytes=self.slices.slot_bytes,
                pieces=self.slices.most_pieces,
                huge_pages=self.huge_pages,
            )
            undo.callback(self.arena.close)
            self.directory = Directory.create(
                layers=self.config.num_hidden_layers,
                experts=self.config.n_routed_experts,
                slots=self._slots,
            )
            undo.callback(self.directory.close)
            self.progress = Progress.create(words_count=Progress.COUNT)
            undo.callback(self.progress.close)
            self.early_demands = EarlySender(self.progress.demands)
            self.early_orders = EarlyOrders.create(readers=self.readers)
            undo.callback(self.early_orders.close)
            self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(self.context.destroy, linger=0)
            accepts = (Hello, Loading, Ready, ReaderStuck, StatsReply, TraceStopped)
            self.control = Channel.bind(self.context, self.endpoints.control, accepts)
            undo.callback(self.control.close)
            undo.callback(self._end_children)
            self._start_service()
            for reader in range(self.readers):
                self.start_reader(reader)
            waiting = set(self.children)
            while waiting:
                waiting.discard(self.hear(Ready).process)
            self.compute = Channel.connect(
                self.context, self.endpoints.experts, "compute", (Landed, DemandFailed)
            )
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _end_children(self) -> None:
        for child in self.children.values():
            child.kill()
            child.reap()

    @property
    def runtime_path(self) -> Path:
        """The private directory with the group's sockets."""
        return self._runtime.path

    # --- the supervisor's part --------------------------------------------------------------------

    def start_reader(self, reader: int, incarnation: int = 0, faults: str | None = None) -> None:
        """Start a reader, or its replacement under a higher incarnation."""
        spec = ReaderSpec(
            reader,
            incarnation,
            self.readers,
            self.endpoints.control,
            self.endpoints.readers,
            [str(path) for path in self.slices.files],
            self.arena.fd,
            self.early_orders.fd,
            self.direct,
            self.busy_poll,
            self.bandwidth,
            self.latency,
            self.faults if faults is None else faults,
            "",
        )
        name = reader_name(reader)
        self.children[name] = spawn_child(
            "expert_io.reader", spec, (self.arena.fd, self.early_orders.fd), name
        )

    def bury(self, name: str) -> int:
        """Wait for a child that was killed; its exit code."""
        return self.children.pop(name).reap()

    def hear(self, kind: type[M], timeout: float = TIMEOUT_S) -> M:
        """The next control message of this kind; others are passed over."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            self.raise_deaths()
            received = self.control.receive(min(left, 0.1))
            if received is not None and isinstance(received[1], kind):
                return received[1]
        raise StallError(f"no {kind.__name__} within {timeout:.0f} s")

    def raise_deaths(self) -> None:
        """Raise what ended a child that has ended; every wait for the group's answers asks this."""
        if time.monotonic() < self._deaths_asked + DEATHS_ASKED_S:
            return
        self._deaths_asked = time.monotonic()
        for name, child in self.children.items():
            if child.process.poll() is not None:
                raise death_error(child, self.bury(name), 0, out_of_memory=False)

    def stats(self) -> dict[str, float]:
        """The service's counters."""
        self.control.send(StatsRequest(0), to="experts")
        return self.hear(StatsReply).counters

    def stop(self) -> None:
        """Ask every child to end, as a supervisor does."""
        for name in self.children:
            self.control.send(Stop(), to=name)

    # --- compute's part ---------------------------------------------------------------------------

    def ask(self, layer: int, experts: Sequence[int]) -> int:
        """Send a demand, waiting while the queue is full; its number."""
        self.demands += 1
        frame = Demand(self.demands, layer, list(experts)).encode()
        self.early_demands.put(frame)
        deadline = time.monotonic() + TIMEOUT_S
        while not self.compute.send_frame(frame):
            if time.monotonic() > deadline:
                raise StallError("the expert service takes no messages")
            self.raise_deaths()
            self.compute.receive(0.01)
        return self.demands

    def fetch(self, layer: int, experts: Sequence[int], timeout: float = TIMEOUT_S) -> None:
        """Demand experts and wait until the directory has all of them."""
        self.ask(layer, experts)
        self.await_resident(layer, experts, timeout)
        self.done_with(self.demands)

    def await_resident(
        self, layer: int, experts: Sequence[int], timeout: float = TIMEOUT_S
    ) -> None:
        """Wait for the directory; raises ReadError with a failed demand's reason."""
        deadline = time.monotonic() + timeout
        while (self.directory.entry[layer].take(experts) == ABSENT).any():
            if time.monotonic() > deadline:
                raise StallError(f"layer {layer}: experts {list(experts)} did not come")
            self.raise_deaths()
            # Slots come free only as compute's epoch moves; it holds none here.
            self.bump_epoch()
            received = self.compute.receive(0.005)
            if received is not None and isinstance(received[1], DemandFailed):
                raise ReadError(received[1].reason)

    def hint(
        self, step: int, layer: int, picks: Sequence[int], ahead: int, predicted: Sequence[int]
    ) -> bool:
        """Publish picks and a prediction."""
        scores = [1.0] * len(predicted)
        return self.compute.send(Hint(step, layer, list(picks), ahead, list(predicted), scores))

    def bump_epoch(self) -> None:
        """Say that compute holds no slot."""
        self.progress.words[Progress.EPOCH] += 1
        full_fence()

    def done_with(self, demand: int) -> None:
        """Say that a demand's experts have been used."""
        self.progress.words[Progress.DEMAND_DONE] = demand

    def _start_service(self) -> None:
        descriptors = (
            self.arena.fd,
            self.directory.fd,
            self.progress.fd,
            self.early_orders.fd,
        )
        spec = ExpertServiceSpec(
            self.endpoints.control,
            self.endpoints.experts,
            self.endpoints.readers,
            str(self.checkpoint),
            str(self.pack or ""),
            self.readers,
            *descriptors,
            self.piece_bytes,
            self.predicted_in_flight,
            self.reserve,
            self.order_timeout,
            self.busy_poll,
            self.policy,
            seed=0,
            warm_experts=self._warm,
            pinned=self._pinned,
            warm_dir=str(self._warm_dir or ""),
            trace="",
        )
        self.children["experts"] = spawn_child("expert_io.service", spec, descriptors, "experts")
