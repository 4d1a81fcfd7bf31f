"""Experts being read or waiting to be, by lane, and the orders that readers hold.

Owns priorities and pieces, knows nothing of slots or directories beyond the numbers it carries.
Promises: a lane's begun reads go on before it begins another; a piece is with one reader at a time;
a reader's death puts its pieces back first in line. Nothing here grows with what merely waits, so
that thousands of warm experts in the background cost an urgent one nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from expert_io.policy import Key
from expert_io.slices import Slice
from protocol.messages import LANE_NAMES, PREDICTED, URGENT

NO_SLOT = -1


@dataclass(slots=True)
class Read:
    """One expert on its way. `todo` are pieces no reader has, `held` counts those that one has.

    `lane` is its present priority, `origin` the lane it was begun in, `demanded` whether it has
    ever been demanded, `demands` those that wait for it. `due` is the (step, layer) a
    prediction is for, `probability` how likely it is. `given_up`: its bytes are no longer wanted,
    or a piece failed with `failure`. `nbytes` have been read so far.
    """

    key: Key
    lane: int
    todo: deque[Slice]
    origin: int = URGENT
    due: tuple[int, int] = (0, 0)
    probability: float = 0.0
    slot: int = NO_SLOT
    generation: int = 0
    held: int = 0
    nbytes: int = 0
    given_up: bool = False
    failure: str = ""
    demanded: bool = False
    demands: set[int] = field(default_factory=set)

    @property
    def begun(self) -> bool:
        """Whether it has a slot."""
        return self.slot != NO_SLOT

    @property
    def over(self) -> bool:
        """Whether no piece is missing or with a reader."""
        return not self.held and (self.given_up or not self.todo)


@dataclass(frozen=True, slots=True)
class Order:
    """A piece in a reader's hands since `since` (seconds, the caller's clock), when `beside`
    readers were busy, this one included. It is read `step` bytes at a time, and can be stopped
    between two of them."""

    number: int
    reader: int
    read: Read
    piece: Slice
    since: float
    beside: int
    step: int

    @property
    def can_be_stopped(self) -> bool:
        return self.step < self.piece.length


class _Lane:
    """Reads of one priority with pieces to give out: those with a slot and those without."""

    def __init__(self) -> None:
        self.begun: OrderedDict[Key, Read] = OrderedDict()
        self.waiting: OrderedDict[Key, Read] = OrderedDict()

    def drop(self, key: Key) -> bool:
        """Take `key` out; whether it was in."""
        begun, waiting = self.begun.pop(key, None), self.waiting.pop(key, None)
        return begun is not None or waiting is not None


class ReadQueue:
    """Every Read by key, in three lanes, and the orders given out."""

    def __init__(self) -> None:
        self.reads: dict[Key, Read] = {}
        self.orders: dict[int, Order] = {}
        self.predictions_begun = 0  # reads in the predicted lane that have a slot
        self._lanes = tuple(_Lane() for _ in LANE_NAMES)
        self._last_order = 0
        self._revisions: list[tuple[Order, bool]] = []

    @property
    def busy_readers(self) -> int:
        """Readers that hold an order."""
        return len({order.reader for order in self.orders.values()})

    def busy_with(self, reader: int) -> int:
        """Readers that hold an order if `reader` is one of them."""
        return len({reader, *(order.reader for order in self.orders.values())})

    @property
    def depth(self) -> int:
        """Reads with pieces that no reader has."""
        return sum(len(lane.begun) + len(lane.waiting) for lane in self._lanes)

    def add(self, read: Read) -> None:
        """Queue a read without a slot at the end of its lane."""
        self.reads[read.key] = read
        self._lanes[read.lane].waiting[read.key] = read

    def begun(self, lane: int) -> Iterable[Read]:
        """The reads of a lane that can be gone on with, oldest first."""
        return self._lanes[lane].begun.values()

    def next_begun(self, lane: int) -> Read | None:
        """The read of a lane to go on with."""
        return next(iter(self.begun(lane)), None)

    def next_waiting(self, lane: int) -> Read | None:
        """The read of a lane to begin next."""
        return next(iter(self._lanes[lane].waiting.values()), None)

    def predictions(self) -> list[Read]:
        """Reads of the predicted lane that are not given up: with pieces to give out, or in the
        middle of one that can be stopped."""
        lane = self._lanes[PREDICTED]
        if not (lane.begun or lane.waiting or self.orders):
            return []
        found = lane.begun | lane.waiting
        for order in self.orders.values():
            if order.can_be_stopped and order.read.lane == PREDICTED and not order.read.given_up:
                found[order.read.key] = order.read
        return list(found.values())

    def begin(self, read: Read, slot: int, generation: int) -> None:
        """Give a waiting read its slot."""
        read.slot, read.generation, read.origin = slot, generation, read.lane
        lane = self._lanes[read.lane]
        lane.begun[read.key] = lane.waiting.pop(read.key)
        self.predictions_begun += read.lane == PREDICTED

    def promote(self, read: Read) -> None:
        """Make a read urgent, whatever it was."""
        if read.lane == URGENT:
            return
        self._revise(read, stop=False)
        self.predictions_begun -= read.lane == PREDICTED and read.begun
        if self._lanes[read.lane].drop(read.key):
            urgent = self._lanes[URGENT]
            (urgent.begun if read.begun else urgent.waiting)[read.key] = read
        read.lane = URGENT

    def give_out(self, read: Read, reader: int, now: float, step: int) -> Order:
        """The next piece of a begun read becomes `reader`'s order, `step` bytes at a time."""
        piece = read.todo.popleft()
        read.held += 1
        if not read.todo:
            self._lanes[read.lane].drop(read.key)
        self._last_order += 1
        beside = self.busy_with(reader)
        order = Order(self._last_order, reader, read, piece, now, beside, step)
        self.orders[order.number] = order
        return order

    def take_back(self, number: int, reader: int) -> Order | None:
        """Close an order of `reader`; None for one it does not hold (answered late or made up)."""
        order = self.orders.get(number)
        if order is None or order.reader != reader:
            return None
        del self.orders[number]
        order.read.held -= 1
        return order

    def reader_lost(self, reader: int) -> list[Read]:
        """Put the pieces of a dead reader back, first in line; the reads it was busy with."""
        lost = [order for order in self.orders.values() if order.reader == reader]
        for order in lost:
            del self.orders[order.number]
            read = order.read
            read.held -= 1
            if not read.given_up:
                read.todo.appendleft(order.piece)
                begun = self._lanes[read.lane].begun
                begun[read.key] = read
                begun.move_to_end(read.key, last=False)
        return list({order.read.key: order.read for order in lost}.values())

    def take_revisions(self) -> list[tuple[Order, bool]]:
        """Orders done in steps that readers are to stop, or (False) to do without further steps;
        each told once."""
        revisions, self._revisions = self._revisions, []
        return revisions

    def _revise(self, read: Read, *, stop: bool) -> None:
        orders = self.orders.values()
        self._revisions += [(o, stop) for o in orders if o.read is read and o.can_be_stopped]

    def give_up(self, read: Read) -> None:
        """Give out no further piece of it, and stop what is being read."""
        read.given_up = True
        self._revise(read, stop=True)
        self._lanes[read.lane].drop(read.key)

    def remove(self, read: Read) -> None:
        """Forget a read that is over, or that never began."""
        self._lanes[read.lane].drop(read.key)
        self.predictions_begun -= read.lane == PREDICTED and read.begun
        del self.reads[read.key]
