"""Which experts are resident, being read, or given up: the decisions of the expert service.

Owns the directory, the slot pool, the read queue and the demands. Has no socket, file or clock: the
service feeds it messages and sends what it returns, a test feeds it anything in any order.

Promises: an expert is read at most once at a time; a slot's bytes do not change while its directory
entry may be seen; what an open demand names is not evicted; `reserve` slots are kept free or
coming, so that a miss need not wait for compute's epoch; a prediction never takes a slot from an
expert that was picked in this step or the one before, which is likelier to be next than a guess.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from expert_io.policy import EvictionPolicy, Key
from expert_io.reads import Order, Read, ReadQueue
from expert_io.slices import SliceMap
from expert_io.slots import SlotPool
from protocol import counters
from protocol.layouts import ABSENT, Directory, Progress, entry_slot, pack_entry
from protocol.messages import BACKGROUND, PREDICTED, URGENT

READS_BY_LANE = (counters.READS_URGENT, counters.READS_PREDICTED, counters.READS_BACKGROUND)


@dataclass(slots=True)
class Outcome:
    """What a finished read means for compute: (demand, expert) pairs that landed or failed."""

    landed: list[tuple[int, int]] = field(default_factory=list)
    failed: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(slots=True)
class _OpenDemand:
    layer: int
    experts: tuple[int, ...]


class Residency:
    """The expert service's state machine over one directory."""

    def __init__(
        self,
        slices: SliceMap,
        directory: Directory,
        progress: Progress,
        policy: EvictionPolicy,
        *,
        reserve: int,
        predicted_in_flight: int,
    ) -> None:
        self._slices = slices
        self._directory = directory
        self._progress = progress
        self._policy = policy
        self._reserve = reserve
        self._predicted_in_flight = predicted_in_flight
        self.slots = SlotPool(directory, progress)
        self.queue = ReadQueue()
        self._demands: dict[int, _OpenDemand] = {}
        self._protected: dict[Key, int] = {}  # how many open demands name a key
        self._resident = 0
        self._last_step: dict[Key, int] = {}
        self._step = 0
        self._unused: set[Key] = set()  # resident for a prediction, not yet picked
        self._evicted_for_prediction: set[Key] = set()
        self.counts: defaultdict[str, float] = defaultdict(float)
        directory.entry[:] = ABSENT
        directory.place[:] = slices.places()

    # --- what compute says ------------------------------------------------------------------------

    def demand(self, demand: int, layer: int, experts: Sequence[int]) -> list[int]:
        """Compute needs `experts` of `layer`; those resident now, the others land later.

        The same demand again changes nothing and returns those that are resident by now.
        """
        self._close_demands()
        if demand <= int(self._progress.words[Progress.DEMAND_DONE]):
            return []
        if demand not in self._demands:
            self._demands[demand] = _OpenDemand(layer, tuple(experts))
            for expert in experts:
                self._protected[layer, expert] = self._protected.get((layer, expert), 0) + 1
        # The layer's other predictions may be picks too: its hint, which names all picks, decides.
        self._drop_predictions(lambda read: read.due < (self._step, layer))
        return [expert for expert in experts if self._demand_one(demand, (layer, expert))]

    def hint(
        self,
        step: int,
        layer: int,
        picks: Sequence[int],
        predicted_layer: int,
        predicted: Sequence[int],
    ) -> None:
        """Compute routed `layer` to `picks` and expects `predicted` (best first) at
        `predicted_layer`; both may be empty."""
        self._step = step
        for expert in picks:
            self._picked((layer, expert))
        chosen = {(layer, expert) for expert in picks}
        self._drop_predictions(lambda read: read.due <= (step, layer) and read.key not in chosen)
        if self._predicted_in_flight:
            for expert in predicted:
                key = (predicted_layer, expert)
                if self._directory.entry[key] == ABSENT and key not in self.queue.reads:
                    self._queue_read(key, PREDICTED, due=(step, predicted_layer))

    def warm(self, keys: Sequence[Key]) -> None:
        """Read `keys` when nothing else is to do and slots are free."""
        for key in keys:
            if self._directory.entry[key] == ABSENT and key not in self.queue.reads:
                self._queue_read(key, BACKGROUND)

    # --- what readers get and say -----------------------------------------------------------------

    def next_order(self, reader: int, now: float, *, urgent_only: bool = False) -> Order | None:
        """The most urgent piece that can be read now, as `reader`'s order."""
        self.slots.reclaim()
        self._close_demands()
        for lane in (URGENT,) if urgent_only else (URGENT, PREDICTED, BACKGROUND):
            read = self.queue.next_begun(lane)
            if read is None:
                read = self.queue.next_waiting(lane)
                # Where one read finds no slot, the others of its lane find none either.
                if read is not None and not self._begin(read):
                    read = None
            if read is not None:
                return self.queue.give_out(read, reader, now)
        return None

    def refill(self) -> None:
        """Make the reserve whole again. Called once orders are out, which need not wait for it."""
        self._evict_down_to(self._reserve, for_prediction=False)

    def done(self, number: int, reader: int) -> Outcome:
        """The piece of this order is in its slot."""
        order = self.queue.take_back(number, reader)
        if order is None:
            return Outcome()
        order.read.nbytes += order.piece.needed
        self.counts[counters.READ_BYTES] += order.piece.needed
        return self._finish(order.read)

    def failed(self, number: int, reader: int, reason: str) -> Outcome:
        """The piece of this order cannot be read."""
        order = self.queue.take_back(number, reader)
        if order is None:
            return Outcome()
        self.counts[counters.READ_FAILURES] += 1
        order.read.failure = order.read.failure or reason
        self.queue.give_up(order.read)
        return self._finish(order.read)

    def reader_lost(self, reader: int) -> Outcome:
        """The reader is dead and writes no more: its orders may be given out again."""
        outcome = Outcome()
        for read in self.queue.reader_lost(reader):
            if read.given_up:
                outcome.failed.extend(self._finish(read).failed)
        return outcome

    @property
    def blocked(self) -> bool:
        """Whether a read waits for nothing but compute's progress, which sends no message."""
        if self.queue.next_waiting(URGENT) is not None:
            return True
        return (
            self.queue.next_waiting(PREDICTED) is not None
            and self.queue.predictions_begun < self._predicted_in_flight
            and self.slots.coming > self.slots.free
        )

    def figures(self) -> dict[str, float]:
        """Counters in the words of `protocol.counters`."""
        return {
            **self.counts,
            counters.QUEUE_DEPTH: self.queue.depth,
            counters.RESIDENT_EXPERTS: self._resident,
        }

    # --- demands and picks ------------------------------------------------------------------------

    def _close_demands(self) -> None:
        done = int(self._progress.words[Progress.DEMAND_DONE])
        for demand in [number for number in self._demands if number <= done]:
            closed = self._demands.pop(demand)
            for expert in closed.experts:
                key = (closed.layer, expert)
                self._protected[key] -= 1
                if not self._protected[key]:
                    del self._protected[key]
                read = self.queue.reads.get(key)
                if read is not None:
                    read.demands.discard(demand)
                    if not read.demands and not read.begun:
                        self.queue.remove(read)

    def _demand_one(self, demand: int, key: Key) -> bool:
        """Whether `key` is resident; otherwise it is now on its way urgently."""
        if self._directory.entry[key] != ABSENT:
            self._picked(key)
            return True
        read = self.queue.reads.get(key)
        if read is None:
            if key in self._evicted_for_prediction:
                self._evicted_for_prediction.discard(key)
                self.counts[counters.HARMFUL_EVICTIONS] += 1
            read = self._queue_read(key, URGENT)
        elif read.lane == PREDICTED and read.begun:
            self.counts[counters.PREDICTED_LATE] += 1
        if not read.given_up:
            self.queue.promote(read)
        read.demands.add(demand)
        return False

    def _picked(self, key: Key) -> None:
        self._last_step[key] = self._step
        self._policy.used(key)
        if key in self._unused:
            self._unused.discard(key)
            self.counts[counters.PREDICTED_USED] += 1

    def _drop_predictions(self, passed: Callable[[Read], bool]) -> None:
        """Give up predictions that came too late: their layer is routed, or has gone by."""
        for read in self.queue.predictions():
            if not passed(read):
                continue
            if read.begun:
                self.queue.give_up(read)
                self._finish(read)
            else:
                self.counts[counters.PREDICTED_DROPPED] += 1
                self.queue.remove(read)

    # --- slots and reads --------------------------------------------------------------------------

    def _queue_read(self, key: Key, lane: int, due: tuple[int, int] = (0, 0)) -> Read:
        pieces = self._slices.experts[key[0]][key[1]].pieces
        read = Read(key, lane, deque(pieces), due=due)
        self.queue.add(read)
        depth = max(self.counts[counters.QUEUE_DEPTH_MAX], self.queue.depth)
        self.counts[counters.QUEUE_DEPTH_MAX] = depth
        return read

    def _begin(self, read: Read) -> bool:
        """Give `read` a slot if its lane may take one now."""
        lane = read.lane
        if lane == PREDICTED and self.queue.predictions_begun >= self._predicted_in_flight:
            return False
        spare = 0 if lane == URGENT else self._reserve
        if self.slots.free <= spare and lane != BACKGROUND:
            self._evict_down_to(spare + 1, for_prediction=lane == PREDICTED)
            # An epoch that has passed already frees the victim's slot at once.
            self.slots.reclaim()
        if self.slots.free <= spare:
            return False
        self.queue.begin(read, *self.slots.take())
        self.counts[READS_BY_LANE[lane]] += 1
        if lane == PREDICTED:
            self.counts[counters.PREDICTED_ISSUED] += 1
        return True

    def _evict_down_to(self, coming: int, *, for_prediction: bool) -> None:
        """Evict until `coming` slots are free or will be, or nothing may be evicted."""
        while self.slots.coming < coming:
            victim = self._policy.victim(self._protected)
            if victim is None:
                return
            if for_prediction:
                if self._last_step.get(victim, -2) >= self._step - 1:
                    return
                self._evicted_for_prediction.add(victim)
            self._evict(victim)

    def _evict(self, key: Key) -> None:
        slot = entry_slot(int(self._directory.entry[key]))
        self._directory.entry[key] = ABSENT
        self._policy.removed(key)
        self.slots.retire(slot)
        self._resident -= 1
        self.counts[counters.EVICTIONS] += 1
        if key in self._unused:
            self._unused.discard(key)
            self.counts[counters.PREDICTED_WASTED_BYTES] += self._nbytes(key)

    def _finish(self, read: Read) -> Outcome:
        """Settle a read if its last piece has been settled."""
        outcome = Outcome()
        if not read.over:
            return outcome
        self.queue.remove(read)
        if read.given_up:
            self.slots.give_back(read.slot)
            if read.failure:
                outcome.failed = [(d, read.key[1], read.failure) for d in sorted(read.demands)]
            elif read.demands:
                # Demanded while its last pieces were being thrown away: start over.
                again = self._queue_read(read.key, URGENT)
                again.demands = read.demands
            else:
                self.counts[counters.PREDICTED_WASTED_BYTES] += read.nbytes
            return outcome
        self._directory.entry[read.key] = pack_entry(read.slot, read.generation)
        self._policy.inserted(read.key)
        self._resident += 1
        self._evicted_for_prediction.discard(read.key)
        if read.origin == PREDICTED and not read.demands:
            self._unused.add(read.key)
        if read.lane == URGENT and read.demands:
            self._picked(read.key)
        outcome.landed = [(demand, read.key[1]) for demand in sorted(read.demands)]
        return outcome

    def _nbytes(self, key: Key) -> int:
        return sum(piece.needed for piece in self._slices.experts[key[0]][key[1]].pieces)
