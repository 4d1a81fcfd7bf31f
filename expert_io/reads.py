"""Experts being read or waiting to be, by lane, and the orders that readers hold.

Owns priorities and pieces, knows nothing of slots or directories beyond the numbers it carries.
Promises: the next piece is always of the most urgent lane that may go on; a piece is with one
reader at a time; a reader's death puts its pieces back first in line.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from expert_io.policy import Key
from expert_io.slices import Slice
from protocol.messages import BACKGROUND, PREDICTED, URGENT

NO_SLOT = -1


@dataclass(slots=True)
class Read:
    """One expert on its way. `todo` are pieces no reader has, `held` counts those that one has.

    `lane` is its present priority, `origin` the lane it came from. `due` is the (step, layer) a
    prediction is for. `given_up`: its bytes are no longer wanted, or a piece failed with `failure`.
    """

    key: Key
    lane: int
    todo: deque[Slice]
    origin: int = URGENT
    due: tuple[int, int] = (0, 0)
    slot: int = NO_SLOT
    generation: int = 0
    held: int = 0
    given_up: bool = False
    failure: str = ""
    demands: set[int] = field(default_factory=set)

    @property
    def started(self) -> bool:
        """Whether it has a slot."""
        return self.slot != NO_SLOT

    @property
    def over(self) -> bool:
        """Whether no piece is missing or with a reader."""
        return not self.held and (self.given_up or not self.todo)


@dataclass(frozen=True, slots=True)
class Order:
    """A piece in a reader's hands since `since` (seconds, the caller's clock)."""

    number: int
    reader: int
    read: Read
    piece: Slice
    since: float


class ReadQueue:
    """Every Read by key, in three lanes, and the orders given out."""

    def __init__(self) -> None:
        self.reads: dict[Key, Read] = {}
        self.orders: dict[int, Order] = {}
        self._lanes: tuple[OrderedDict[Key, None], ...] = (
            OrderedDict(),
            OrderedDict(),
            OrderedDict(),
        )
        self._last_order = 0

    @property
    def depth(self) -> int:
        """Reads with pieces that no reader has."""
        return sum(len(lane) for lane in self._lanes)

    def add(self, read: Read) -> None:
        """Queue a read at the end of its lane."""
        self.reads[read.key] = read
        self._lanes[read.lane][read.key] = None

    def promote(self, read: Read) -> None:
        """Make a read urgent, whatever it was."""
        if read.lane != URGENT and self._lanes[read.lane].pop(read.key, 0) is None:
            self._lanes[URGENT][read.key] = None
        read.lane = URGENT

    def waiting(self, lane: int) -> Iterator[Read]:
        """Reads of a lane with pieces to give out, in order; invalid once the lane changes."""
        return (self.reads[key] for key in self._lanes[lane])

    def started(self, lane: int) -> int:
        """Reads of a lane that have a slot."""
        return sum(read.started for read in self.reads.values() if read.lane == lane)

    def give_out(self, read: Read, reader: int, now: float) -> Order:
        """The read's next piece becomes `reader`'s order."""
        piece = read.todo.popleft()
        read.held += 1
        if not read.todo:
            self._lanes[read.lane].pop(read.key, None)
        self._last_order += 1
        order = Order(self._last_order, reader, read, piece, now)
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

    def reader_lost(self, reader: int) -> None:
        """Put the pieces of a dead reader back, first in line."""
        for order in [o for o in self.orders.values() if o.reader == reader]:
            del self.orders[order.number]
            read = order.read
            read.held -= 1
            if not read.given_up:
                read.todo.appendleft(order.piece)
                self._lanes[read.lane][read.key] = None
                self._lanes[read.lane].move_to_end(read.key, last=False)

    def give_up(self, read: Read) -> None:
        """Give out no further piece of it."""
        read.given_up = True
        self._lanes[read.lane].pop(read.key, None)

    def remove(self, read: Read) -> None:
        """Forget a read that is over."""
        self._lanes[read.lane].pop(read.key, None)
        del self.reads[read.key]


__all__ = ["BACKGROUND", "NO_SLOT", "PREDICTED", "URGENT", "Order", "Read", "ReadQueue"]
