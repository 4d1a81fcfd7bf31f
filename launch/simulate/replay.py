"""One run replayed: the service's own residency, policy, scheduler and read queue under a clock
that jumps from event to event.

Owns compute's and the readers' parts and nothing of what is decided: those objects are the very
classes that `expert_io.service` wires to sockets.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from expert_io.dispatch import Dispatcher
from expert_io.policy import EvictionPolicy
from expert_io.reads import Order
from expert_io.residency import Residency
from expert_io.scheduler import ExpectedGain
from expert_io.slices import BLOCK, ExpertSlices, Slice, SliceMap
from launch.simulate.disk import Disk, DiskModel
from protocol.layouts import ABSENT, Directory, Progress, Words, align_up

# As the service looks at compute's progress while a read waits for it.
PROGRESS_LOOK_S = 0.0005
# As many hits as compute holds at once.
HELD_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Said:
    """What one predictor said at a layer: `experts` of layer `ahead`, best first."""

    ahead: int
    experts: Sequence[int]
    scores: Sequence[float]


NOTHING = Said(-1, (), ())


@dataclass(frozen=True, slots=True)
class LayerPass:
    """One layer in one pass: compute needs `before` seconds up to its routing, `after` from there
    on with every expert here, and `waking` more each time it has waited, since its processor's
    caches are cold by then; it picks `picks` (distinct, ascending) for `tokens` tokens and says
    `said`. `said_first` is known before its attention."""

    step: int
    layer: int
    before: float
    after: float
    picks: Sequence[int]
    said: Sequence[Said]
    tokens: int = 1
    said_first: Sequence[Said] = ()
    waking: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run is replayed on. `message_s` passes until another process has heard of something:
    four times in a miss, to the service, to a reader, and back. `turn_s` passes between two reads
    of one reader, which need not wake up for the second."""

    slots: int
    readers: int
    reserve: int
    disk: DiskModel
    slices: SliceMap
    predicted_in_flight: int
    message_s: float = 0.0
    turn_s: float = 0.0

    @property
    def layers(self) -> int:
        return len(self.slices.experts)

    @property
    def experts(self) -> int:
        """Of one layer."""
        return len(self.slices.experts[0])


@dataclass(slots=True)
class _Reading:
    """The order that a reader reads since `began`; `done` bytes of it at the end of its present
    step. `stop` is what has been said of it since: to stop, or to take no further steps."""

    order: Order
    began: float
    done: int
    stop: bool | None = None

    @property
    def left(self) -> int:
        """Bytes beyond the present step."""
        return self.order.piece.length - self.done


def plain_slices(layers: int, experts: int, expert_bytes: int, piece_bytes: int) -> SliceMap:
    """Every expert as one range of bytes that begins at a block, cut as the service cuts it."""
    piece = align_up(piece_bytes, BLOCK)
    pieces = []
    for number, at in enumerate(range(0, expert_bytes, piece)):
        needed = min(piece, expert_bytes - at)
        pieces.append(Slice(0, at, align_up(needed, BLOCK), needed, at, (), number))
    expert = ExpertSlices(tuple(pieces), (0,) * 6, align_up(expert_bytes, BLOCK))
    row = (expert,) * experts
    return SliceMap((Path("experts"),), (row,) * layers, expert.nbytes)


class Replay:
    """Runs layer passes one after the other; figures stand here and in `residency.figures()`."""

    def __init__(self, machine: Machine, policy: EvictionPolicy, scheduler: ExpectedGain) -> None:
        self.now = 0.0
        self.stalled = 0.0
        self.hits = self.misses = 0
        self._message_s, self._turn_s = machine.message_s, machine.turn_s
        self._disk = Disk(machine.disk)
        self._directory = Directory.create(
            layers=machine.layers, experts=machine.experts, slots=machine.slots
        )
        self._progress = Progress.create(words_count=Progress.COUNT)
        self.residency = Residency(
            machine.slices,
            self._directory,
            self._progress,
            policy,
            scheduler,
            reserve=machine.reserve,
            predicted_in_flight=machine.predicted_in_flight,
        )
        self._dispatcher = Dispatcher(self.residency)
        self._queued: dict[int, deque[Order]] = {}
        for reader in range(machine.readers):
            self._dispatcher.joined(reader)
            self._queued[reader] = deque()
        self._readings: dict[int, _Reading] = {}  # by their orders' numbers
        self._messages: list[tuple[float, int, Callable[[], None]]] = []
        self._sent = 0
        self._looking = False
        self._last: LayerPass | None = None
        self._most_demanded = max(1, machine.slots // 2)
        self._demand = 0
        self._open: deque[tuple[int, set[int]]] = deque()

    def close(self) -> None:
        """Give the shared memory back."""
        self._directory.close()
        self._progress.close()

    def layer(self, at: LayerPass) -> None:
        """Compute goes through one layer."""
        before, self._last = self._last, at
        if before is not None:
            for said in at.said_first:
                self._send(partial(self._hint, before, said))
        self._compute(at.before)
        for said in at.said or (NOTHING,):
            self._send(partial(self._hint, at, said))
        row = self._directory.entry[at.layer]
        pending = list(at.picks)
        self._let_go()
        missing = sum(row[expert] == ABSENT for expert in pending)
        self.hits += len(pending) - missing
        self.misses += missing
        self._demand_absent(at.layer, pending)
        # The shared expert is computed first, while what is missing lands.
        each = at.after / (1 + len(pending))
        self._compute(each)
        while pending:
            here = [expert for expert in pending if row[expert] != ABSENT][:HELD_AT_ONCE]
            for expert in here:
                self._compute(each)
                self._used(expert)
            pending = [expert for expert in pending if expert not in here]
            self._let_go()
            self._demand_absent(at.layer, pending)
            if pending and not here:
                self._await(row, pending)
                self._compute(at.waking)
        self._let_go()

    # --- compute ----------------------------------------------------------------------------------

    def _compute(self, seconds: float) -> None:
        """Compute is busy, and the others go on."""
        end = self.now + seconds
        while self._next_event() <= end:
            self._happen()
        self.now = end

    def _await(self, row: Words, pending: Sequence[int]) -> None:
        begin = self.now
        while all(row[expert] == ABSENT for expert in pending):
            if self._next_event() == math.inf:
                raise AssertionError("nothing brings what compute waits for; this is a defect")
            self._happen()
            self._let_go()
        self._compute(self._message_s)
        self.stalled += self.now - begin

    def _demand_absent(self, layer: int, pending: Sequence[int]) -> None:
        """As `compute.arena_experts` does: at most half of the slots, in pieces if it is more."""
        row = self._directory.entry[layer]
        asked = {expert for _, unused in self._open for expert in unused}
        missing = [e for e in pending if row[e] == ABSENT and e not in asked]
        room, piece = self._most_demanded - len(asked), len(missing)
        if piece > room:
            piece = max(1, self._most_demanded // 4)
            missing = missing[: room // piece * piece]
        for begin in range(0, len(missing), piece or 1):
            self._demand += 1
            experts = missing[begin : begin + piece]
            self._open.append((self._demand, set(experts)))
            self._send(partial(self._demanded, self._demand, layer, experts))

    def _used(self, expert: int) -> None:
        for _, unused in self._open:
            unused.discard(expert)
        while self._open and not self._open[0][1]:
            self._progress.words[Progress.DEMAND_DONE] = self._open.popleft()[0]

    def _let_go(self) -> None:
        self._progress.words[Progress.EPOCH] += 1

    # --- the service and its readers --------------------------------------------------------------

    def _hint(self, at: LayerPass, said: Said) -> None:
        self.residency.hint(
            at.step, at.layer, at.picks, said.ahead, said.experts, said.scores, self.now
        )
        self._give_orders()

    def _demanded(self, demand: int, layer: int, experts: list[int]) -> None:
        self.residency.demand(demand, layer, experts, self.now)
        self._give_orders()

    def _give_orders(self) -> None:
        for order, stop in self.residency.queue.take_revisions():
            self._send(partial(self._revise, order.number, stop))
        for order in self._dispatcher.orders(self.now):
            queue = self._queued[order.reader]
            queue.append(order)
            if len(queue) == 1:
                self._send(partial(self._start, order.reader))
        self.residency.refill()
        if self._dispatcher.must_look and not self._looking:
            self._looking = True
            self._send(self._look_again, PROGRESS_LOOK_S)

    def _look_again(self) -> None:
        self._looking = False
        self._give_orders()

    def _start(self, reader: int) -> None:
        """The reader begins its oldest order."""
        order = self._queued[reader][0]
        self._readings[order.number] = _Reading(order, self.now, order.step)
        self._disk.start(self.now, order.number, order.step)

    def _read(self, number: int) -> None:
        """The reader has read a step of its oldest order."""
        reading = self._readings[number]
        order, left = reading.order, reading.left
        if left and not reading.stop:
            step = left if reading.stop is False else min(order.step, left)
            reading.done += step
            self._disk.start(self.now, number, step)
            return
        del self._readings[number]
        queue = self._queued[order.reader]
        queue.popleft()
        if queue:
            self._send(partial(self._start, order.reader), self._turn_s)
        self._send(partial(self._answered, reading, self.now - reading.began))

    def _revise(self, number: int, stop: bool) -> None:
        if number in self._readings:
            self._readings[number].stop = stop

    def _answered(self, reading: _Reading, seconds: float) -> None:
        order = reading.order
        self._dispatcher.answered(order.reader)
        if reading.left:
            self.residency.stopped(order.number, order.reader, reading.done, seconds)
        else:
            self.residency.done(order.number, order.reader, seconds, self.now)
        self._give_orders()

    # --- the clock --------------------------------------------------------------------------------

    def _send(self, message: Callable[[], None], after: float | None = None) -> None:
        """`message` is heard `after` seconds, or as long as messages take, from now."""
        self._sent += 1
        delay = self._message_s if after is None else after
        heapq.heappush(self._messages, (self.now + delay, self._sent, message))

    def _next_event(self) -> float:
        message = self._messages[0][0] if self._messages else math.inf
        return min(message, self._disk.next_end())

    def _happen(self) -> None:
        """What happens next."""
        self.now = max(self.now, self._next_event())
        while self._messages and self._messages[0][0] <= self.now:
            heapq.heappop(self._messages)[2]()
        for number in self._disk.finished(self.now):
            self._read(number)
