"""Which experts are resident, being read, or given up: the decisions of the expert service.

Owns the directory, the slot pool, the read queue and the demands. Has no socket, file or clock: the
service feeds it messages and sends what it returns, a test feeds it anything in any order.

Promises: an expert is read at most once at a time; a slot's bytes do not change while its directory
entry may be seen; what an open demand names is not evicted; `reserve` slots are kept free, coming,
or lent to guesses in flight, so that a miss need not wait for compute's epoch; no predicted piece
is given out while an urgent one is wanted. Times are seconds of the caller's one clock.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from expert_io.demands import OpenDemands
from expert_io.landed_guesses import LandedGuesses
from expert_io.policy import EvictionPolicy, Key
from expert_io.reads import Order, Read, ReadQueue
from expert_io.scheduler import ExpectedGain, Guess
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


class Residency:
    """The expert service's state machine over one directory."""

    def __init__(
        self,
        slices: SliceMap,
        directory: Directory,
        progress: Progress,
        policy: EvictionPolicy,
        scheduler: ExpectedGain,
        *,
        reserve: int,
        predicted_in_flight: int,
    ) -> None:
        self._slices = slices
        self._directory = directory
        self._progress = progress
        self.policy = policy
        self._scheduler = scheduler
        self._reserve = reserve
        self._predicted_in_flight = predicted_in_flight
        self.slots = SlotPool(directory, progress)
        self.queue = ReadQueue()
        self._demands = OpenDemands()
        self._closed = 0  # all demands up to this one
        self._resident = 0
        self._step = 0
        self._landed_guesses = 0  # since the reserve was last made whole
        self._routed: set[Key] = set()  # the picks of the last hint
        # Picks of open demands, which may overtake the hint that names them.
        self._picked_early: set[Key] = set()
        self._last_routing: tuple[int, ...] = ()
        # The last hint's picks miss, and their demand, which comes next, has not come yet.
        self._demand_due = False
        self._waited_for: set[Key] = set()  # demanded and not here yet
        self._guesses = LandedGuesses(scheduler.returns)
        self._spared = ChainMap[Key, Any](self._demands.protected, self._guesses.expected)
        self.counts: defaultdict[str, float] = defaultdict(float)
        directory.entry[:] = directory.arriving[:] = ABSENT
        directory.pieces[:] = slices.pieces()
        directory.place[:] = slices.places()

    # --- what compute says ------------------------------------------------------------------------

    def demand(
        self, demand: int, layer: int, experts: Sequence[int], now: float = 0.0
    ) -> list[int]:
        """Compute needs `experts` of `layer`; those resident now, the others land later.

        The same demand again changes nothing and returns those that are resident by now.
        """
        self._close_demands(now)
        if demand <= int(self._progress.words[Progress.DEMAND_DONE]):
            return []
        self._demand_due = False
        self._demands.open(demand, [(layer, expert) for expert in experts])
        # The layer's other predictions may be picks too: its hint, which names all picks, decides.
        self._cancel_predictions(lambda read: read.due < (self._step, layer))
        here = [expert for expert in experts if self._demand_one(demand, (layer, expert))]
        if not self._waited_for:
            self._scheduler.pace.landed(now)
        return here

    def hint(
        self,
        step: int,
        layer: int,
        picks: Sequence[int],
        predicted_layer: int,
        predicted: Sequence[int],
        scores: Sequence[float],
        now: float = 0.0,
    ) -> None:
        """Compute routed `layer` to `picks` and expects `predicted` (best first) at
        `predicted_layer`; both may be empty. Larger `scores` are likelier."""
        self._close_demands(now)
        self._step = step
        routed = {(layer, expert) for expert in picks}
        absent = {key for key in routed if self._directory.entry[key] == ABSENT}
        if (step, layer, *picks) != self._last_routing:
            self._route(step, layer, routed, absent, now)
        self._last_routing = (step, layer, *picks)
        if self._predicted_in_flight and predicted:
            row = self._directory.entry[predicted_layer]
            named = [
                (expert, score)
                for expert, score in zip(predicted, scores, strict=True)
                if row[expert] == ABSENT
            ]
            self._scheduler.predicted((step, layer), predicted_layer, named, len(predicted))
            for expert, _ in named:
                read = self.queue.reads.get((predicted_layer, expert))
                guess = read and self._scheduler.taken(read.key)
                if read and guess:
                    # Who names it again is nearer and knows more.
                    read.probability = guess.probability

    def pin(self, keys: Sequence[Key]) -> None:
        """Read `keys` when nothing else is to do, and never give them up."""
        for key in keys:
            self._demands.pin(key)
        self.warm(keys)

    def warm(self, keys: Sequence[Key]) -> None:
        """Read `keys` when nothing else is to do and slots are free."""
        for key in keys:
            if self._directory.entry[key] == ABSENT and key not in self.queue.reads:
                self._queue_read(key, BACKGROUND)

    # --- what readers get and say -----------------------------------------------------------------

    def next_order(self, reader: int, now: float, *, urgent_only: bool = False) -> Order | None:
        """The most urgent piece that can be read now, as `reader`'s order."""
        self.slots.reclaim()
        self._close_demands(now)
        for lane in (URGENT,) if urgent_only else (URGENT, PREDICTED, BACKGROUND):
            read = self._predicted(now) if lane == PREDICTED else self.queue.next_begun(lane)
            if read is None and lane != PREDICTED:
                read = self.queue.next_waiting(lane)
                # Where one read finds no slot, the others of its lane find none either.
                if read is not None and not self._begin(read):
                    read = None
            if read is not None:
                step = length = read.todo[0].length
                if lane == PREDICTED:
                    step = self._scheduler.disk.step(length, self.queue.busy_with(reader))
                return self.queue.give_out(read, reader, now, step)
        return None

    def refill(self) -> None:
        """Make the reserve whole again. Called once orders are out, which need not wait for it."""
        # A guess in flight borrows from the reserve: right, it is one of the misses the reserve
        # is for; wrong, it gives its slot back unless it has landed.
        borrowed = self.queue.predictions_begun
        self._evict_down_to(self._reserve - borrowed - self._landed_guesses, for_prediction=False)
        self._evict_down_to(self._reserve - borrowed, for_prediction=True)
        self._landed_guesses = 0

    def done(self, number: int, reader: int, seconds: float = 0.0, now: float = 0.0) -> Outcome:
        """The piece of this order is in its slot; the reader took `seconds` for it."""
        order = self.queue.take_back(number, reader)
        if order is None:
            return Outcome()
        self._brought(order, order.piece.needed, seconds)
        outcome = self._finish(order.read)
        if outcome.landed and not self._waited_for:
            self._scheduler.pace.landed(now)
        return outcome

    def stopped(self, number: int, reader: int, nbytes: int, seconds: float) -> Outcome:
        """The reader has stopped after `nbytes`, since the read was given up."""
        order = self.queue.take_back(number, reader)
        if order is None:
            return Outcome()
        self._brought(order, nbytes, seconds)
        return self._finish(order.read)

    def failed(self, number: int, reader: int, reason: str, now: float = 0.0) -> Outcome:
        """The piece of this order cannot be read."""
        # Whoever found the expert whole, since a reader died that had read the piece, has no use
        # for the failure.
        self._close_demands(now)
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
            self._scheduler.promising > 0
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

    def _close_demands(self, now: float) -> None:
        """Demands that compute has used: it may have seen the last piece land before this did."""
        done = int(self._progress.words[Progress.DEMAND_DONE])
        if done == self._closed:
            return
        self._closed, waited = done, bool(self._waited_for)
        for demand, key in self._demands.close(done):
            self._picked_early.discard(key)
            read = self.queue.reads.get(key)
            if read is not None:
                read.demands.discard(demand)
                if not read.demands:
                    self._waited_for.discard(key)
                if not read.demands and not read.begun:
                    self.queue.remove(read)
        if waited and not self._waited_for:
            self._scheduler.pace.landed(now)

    def _demand_one(self, demand: int, key: Key) -> bool:
        """Whether `key` is resident; otherwise it is now on its way urgently."""
        if key not in self._routed:
            self._picked(key)
            self._picked_early.add(key)
        if self._directory.entry[key] != ABSENT:
            return True
        read = self.queue.reads.get(key)
        if read is None:
            read = self._queue_read(key, URGENT)
            self._scheduler.taken(key)
        elif read.origin == PREDICTED and read.begun and not read.demanded:
            self.counts[counters.PREDICTED_LATE] += 1
        if not read.given_up:
            self.queue.promote(read)
        read.demands.add(demand)
        read.demanded = True
        self._waited_for.add(key)
        return False

    def _route(self, step: int, layer: int, routed: set[Key], absent: set[Key], now: float) -> None:
        """`layer` has picked `routed`, of which `absent` will be demanded."""
        self._routed, self._demand_due = routed, False
        for key in routed:
            if key not in self._picked_early:
                self._picked(key)
        picks = {expert for _, expert in routed}
        dropped = self._scheduler.routed(now, step, layer, picks, bool(absent))
        self.counts[counters.PREDICTED_DROPPED] += dropped
        self._cancel_predictions(lambda read: read.due <= (step, layer) and read.key not in routed)
        self._guesses.routed((step, layer))
        for key in absent:
            read = self.queue.reads.get(key)
            if read is None:
                self._demand_due = True
            elif not read.given_up:
                self.queue.promote(read)

    def _picked(self, key: Key) -> None:
        self.policy.used(key)
        if self._scheduler.returns.picked(key) and self._directory.entry[key] == ABSENT:
            self.counts[counters.HARMFUL_EVICTIONS] += 1
        self.counts[counters.PREDICTED_USED] += self._guesses.picked(key)

    def _cancel_predictions(self, passed: Callable[[Read], bool]) -> None:
        """Give up predicted reads that came too late: their layer is routed, or has gone by."""
        for read in self.queue.predictions():
            if passed(read):
                self._scheduler.returns.cancelled()
                self.queue.give_up(read)
                self._finish(read)

    # --- slots and reads --------------------------------------------------------------------------

    def _queue_read(self, key: Key, lane: int, due: tuple[int, int] = (0, 0)) -> Read:
        pieces = self._slices.experts[key[0]][key[1]].pieces
        read = Read(key, lane, deque(pieces), due=due)
        self.queue.add(read)
        depth = max(self.counts[counters.QUEUE_DEPTH_MAX], self.queue.depth)
        self.counts[counters.QUEUE_DEPTH_MAX] = depth
        return read

    def _predicted(self, now: float) -> Read | None:
        """The predicted read whose next piece is worth reading now, begun if need be."""
        if self._demand_due or self._waited_for:
            return None
        best, most, busy = None, 0.0, self.queue.busy_readers
        for read in self.queue.begun(PREDICTED):
            begun = Guess(read.key, read.due[0], read.probability)
            nbytes = read.todo[0].needed
            worth = self._scheduler.gain(now, begun, nbytes, busy, evicts=False)
            if worth > most:
                best, most = read, worth
        if self.queue.predictions_begun >= self._predicted_in_flight:
            return best
        nbytes = self._slices.experts[0][0].pieces[0].needed
        guess = self._scheduler.best(now, nbytes, busy, above=most)
        if guess is None:
            return best
        read = self._queue_read(guess.key, PREDICTED, guess.due)
        read.probability = guess.probability
        if not self._begin(read):
            self.queue.remove(read)
            return best
        self._scheduler.begun(guess)
        return read

    def _begin(self, read: Read) -> bool:
        """Give `read` a slot if its lane may take one now."""
        lane = read.lane
        spare = 0 if lane == URGENT else self._reserve
        if lane == PREDICTED:
            spare = max(0, spare - self._predicted_in_flight)
        if self.slots.free <= spare and lane != BACKGROUND:
            self._evict_down_to(spare + 1, for_prediction=lane == PREDICTED)
            # An epoch that has passed already frees the victim's slot at once.
            self.slots.reclaim()
        if self.slots.free <= spare:
            return False
        self.queue.begin(read, *self.slots.take())
        self._directory.arriving[read.key] = pack_entry(read.slot, read.generation)
        self.counts[READS_BY_LANE[lane]] += 1
        if lane == PREDICTED:
            self.counts[counters.PREDICTED_ISSUED] += 1
        return True

    def _evict_down_to(self, coming: int, *, for_prediction: bool) -> None:
        """Evict until `coming` slots are free or will be, or nothing may be evicted."""
        while self.slots.coming < coming:
            # A guess that has landed stays until it is known whether it was right, if it can.
            spared, protected = self._spared, self._demands.protected
            victim = self.policy.victim(spared) or self.policy.victim(protected)
            if victim is None:
                return
            self._evict(victim)
            self._scheduler.returns.evicted(self._resident, victim if for_prediction else None)

    def _evict(self, key: Key) -> None:
        slot = entry_slot(int(self._directory.entry[key]))
        self._directory.entry[key] = ABSENT
        self.policy.removed(key)
        self.slots.retire(slot)
        self._resident -= 1
        self.counts[counters.EVICTIONS] += 1
        if self._guesses.evicted(key):
            self.counts[counters.PREDICTED_WASTED_BYTES] += self._nbytes(key)

    def _brought(self, order: Order, nbytes: int, seconds: float) -> None:
        """An order that was taken back has read so many bytes."""
        order.read.nbytes += nbytes
        self.counts[counters.READ_BYTES] += nbytes
        beside = max(order.beside, self.queue.busy_with(order.reader))
        self._scheduler.disk.read(nbytes, seconds, beside)

    def _finish(self, read: Read) -> Outcome:
        """Settle a read if its last piece has been settled."""
        outcome = Outcome()
        if not read.over:
            return outcome
        self.queue.remove(read)
        self._waited_for.discard(read.key)
        if read.given_up:
            self._directory.arriving[read.key] = ABSENT
            # Whole nevertheless where a reader died before it could say so: compute may read it.
            self.slots.retire(read.slot)
            if read.failure:
                outcome.failed = [(d, read.key[1], read.failure) for d in sorted(read.demands)]
            elif read.demands:
                # Demanded while its last pieces were being thrown away: start over.
                again = self._queue_read(read.key, URGENT)
                again.demands = read.demands
                self._waited_for.add(read.key)
            else:
                self.counts[counters.PREDICTED_WASTED_BYTES] += read.nbytes
            return outcome
        self._directory.entry[read.key] = pack_entry(read.slot, read.generation)
        self._directory.arriving[read.key] = ABSENT
        self.policy.inserted(read.key)
        self._resident += 1
        if read.origin == PREDICTED and not read.demanded:
            self._guesses.landed(read.key, read.due)
            self._landed_guesses += 1
            if read.lane == URGENT:  # picked, and there before compute had to ask for it
                self.counts[counters.PREDICTED_USED] += self._guesses.picked(read.key)
        outcome.landed = [(demand, read.key[1]) for demand in sorted(read.demands)]
        return outcome

    def _nbytes(self, key: Key) -> int:
        return sum(piece.needed for piece in self._slices.experts[key[0]][key[1]].pieces)
