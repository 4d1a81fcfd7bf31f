"""A residency over a small made-up checkpoint: no files, no processes, any order of events."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from expert_io.policies import make_policy
from expert_io.policy import Key
from expert_io.reads import Order
from expert_io.residency import Outcome, Residency
from expert_io.scheduler import DiskPace, Eager, ExpectedGain
from expert_io.slices import BLOCK, ExpertSlices, Slice, SliceMap
from protocol import counters
from protocol.layouts import (
    ABSENT,
    PAGE,
    Arena,
    Directory,
    Progress,
    entry_slot,
    full_fence,
    look_up,
)

LAYERS, EXPERTS, PIECES = 3, 8, 3


def slice_map() -> SliceMap:
    """Every expert in three one-block pieces."""
    pieces = tuple(Slice(0, n * BLOCK, BLOCK, BLOCK, n * BLOCK, (), n) for n in range(PIECES))
    expert = ExpertSlices(pieces, (0, 1, 2, 3, 4, 5), PIECES * BLOCK)
    row = (expert,) * EXPERTS
    return SliceMap((Path("shard"),), (row,) * LAYERS, PIECES * BLOCK)


class Halves(DiskPace):
    """So slow a disk that a piece is read in two steps."""

    def step(self, nbytes: int, beside: int) -> int:
        return nbytes // 2


@dataclass
class SmallWorld:
    """The residency with its two neighbours played by the test; `held` are readers' open orders."""

    slots: int = 10
    reserve: int = 2
    predicted_in_flight: int = 2
    policy: str = "lru"
    scheduler: ExpectedGain = field(default_factory=Eager)
    held: dict[int, deque[Order]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory = Directory.create(layers=LAYERS, experts=EXPERTS, slots=self.slots)
        self.arena = Arena.create(slots=self.slots, slot_bytes=PAGE, pieces=PIECES)
        self.progress = Progress.create(words_count=Progress.COUNT)
        self.scheduler.disk = Halves()
        self.residency = Residency(
            slice_map(),
            self.directory,
            self.progress,
            make_policy(self.policy, 0),
            self.scheduler,
            reserve=self.reserve,
            predicted_in_flight=self.predicted_in_flight,
        )

    # --- compute ----------------------------------------------------------------------------------

    def bump_epoch(self) -> None:
        """Compute holds no slot."""
        self.progress.words[Progress.EPOCH] += 1
        full_fence()

    def done_with(self, demand: int) -> None:
        """Compute has used a demand's experts."""
        self.progress.words[Progress.DEMAND_DONE] = demand

    def slot_of(self, key: Key) -> int | None:
        """Where the directory says `key` is."""
        word = int(self.directory.entry[key])
        return None if word == ABSENT else entry_slot(word)

    def found(self, layer: int) -> list[int]:
        """What compute finds of a layer's experts, ABSENT where one is not there."""
        return look_up(self.directory, self.arena, layer, range(EXPERTS))

    def hint(
        self, step: int, layer: int, picks: list[int], ahead: int, predicted: list[int]
    ) -> None:
        """Publish picks and a prediction."""
        self.residency.hint(step, layer, picks, ahead, predicted, [1.0] * len(predicted))

    # --- readers ----------------------------------------------------------------------------------

    def take_order(self, reader: int = 0) -> Order | None:
        """Give the reader its next order."""
        order = self.residency.next_order(reader, 0.0)
        self.residency.refill()
        if order is not None:
            self.held.setdefault(reader, deque()).append(order)
        return order

    def read(self, reader: int = 0) -> None:
        """The reader's oldest order is read, and the service has not heard of it yet."""
        order = self.held[reader][0]
        self.arena.landed[order.read.slot, order.piece.number] = order.read.generation

    def finish(self, reader: int = 0) -> Outcome:
        """The reader's oldest order is read, and the service hears of it."""
        self.read(reader)
        order = self.held[reader].popleft()
        return self.residency.done(order.number, reader)

    def heed(self) -> int:
        """Readers stop what they are told to and have not read to its end; how many did."""
        stopped = 0
        for order, stop in self.residency.queue.take_revisions():
            begun = self.held.get(order.reader, ())
            landed = self.arena.landed[order.read.slot, order.piece.number]
            if stop and order in begun and landed != order.read.generation:
                self.held[order.reader].remove(order)
                self.residency.stopped(order.number, order.reader, order.step, 0.0)
                stopped += 1
        return stopped

    def fail(self, reason: str, reader: int = 0) -> Outcome:
        """The reader's oldest order cannot be read."""
        order = self.held[reader].popleft()
        return self.residency.failed(order.number, reader, reason)

    def lose_reader(self, reader: int) -> None:
        """The reader is dead; nobody answers what it held."""
        self.held.pop(reader, None)
        self.residency.reader_lost(reader)

    def read_all(self) -> list[tuple[int, int]]:
        """Read until there is nothing to read; the (demand, expert) pairs that landed."""
        landed: list[tuple[int, int]] = []
        while self.take_order() is not None:
            landed.extend(self.finish().landed)
        return landed


@dataclass
class Chaos:
    """Random events against a SmallWorld, with a model of what compute may be reading.

    `visible` holds, for each slot in which compute found an expert since its last epoch, the
    generation it saw: the invariant is that this generation stands until the epoch moves.
    """

    world: SmallWorld
    seed: int
    demand: int = 0
    step: int = 0
    open: dict[int, tuple[int, set[int]]] = field(default_factory=dict)
    visible: dict[int, int] = field(default_factory=dict)
    stopped: int = 0
    filling: dict[int, Key] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def turn(self) -> None:
        """One random event, then every invariant."""
        asking = [self.ask, self.ask, self.hint, self.look, self.use, self.use, self.let_go]
        reading = [self.order, self.order, self.read, self.land, self.land, self.land, self.fail]
        event = self.random.choice([*asking, *reading, self.lose_reader, self.heed])
        event()
        self.check()

    def ask(self) -> None:
        if len(self.open) < 2:
            self.demand += 1
            layer = self.random.randrange(LAYERS)
            experts = self.random.sample(range(EXPERTS), self.random.randint(1, 2))
            self.open[self.demand] = (layer, set(experts))
            self.world.residency.demand(self.demand, layer, experts)
        else:
            demand, (layer, experts_left) = self.random.choice(list(self.open.items()))
            self.world.residency.demand(demand, layer, sorted(experts_left))

    def hint(self) -> None:
        layer = self.random.randrange(LAYERS - 1)
        self.step += layer == 0
        guess = self.random.sample(range(EXPERTS), 3)
        picks = self.random.sample(range(EXPERTS), 2)
        self.world.residency.hint(self.step, layer, picks, layer + 1, guess, [1.0] * 3)
        if self.random.random() < 0.5:
            self.heed()

    def order(self) -> None:
        self.world.take_order(self.random.randrange(3))

    def read(self) -> None:
        busy = [reader for reader, orders in self.world.held.items() if orders]
        if busy:
            self.world.read(self.random.choice(busy))

    def land(self) -> None:
        busy = [reader for reader, orders in self.world.held.items() if orders]
        if busy:
            self.world.finish(self.random.choice(busy))

    def fail(self) -> None:
        busy = [reader for reader, orders in self.world.held.items() if orders]
        if busy and self.random.random() < 0.2:
            reader = self.random.choice(busy)
            for demand, expert, reason in self.world.fail("EIO", reader).failed:
                assert reason == "EIO"
                assert demand in self.open and expert in self.open[demand][1]

    def heed(self) -> None:
        self.stopped += self.world.heed()

    def lose_reader(self) -> None:
        reader = self.random.randrange(3)
        self.world.lose_reader(reader)

    def look(self) -> None:
        for layer in range(LAYERS):
            for word in self.world.found(layer):
                if word != ABSENT:
                    self.visible[entry_slot(word)] = word >> 32

    def use(self) -> None:
        """Compute finishes its oldest demand if all of it is here."""
        if not self.open:
            return
        oldest = min(self.open)
        layer, experts = self.open[oldest]
        found = self.world.found(layer)
        if all(found[expert] != ABSENT for expert in experts):
            del self.open[oldest]
            self.world.done_with(oldest)

    def let_go(self) -> None:
        self.visible.clear()
        self.world.bump_epoch()

    def check(self) -> None:
        world = self.world
        for slot, generation in self.visible.items():
            assert world.directory.generation[slot] == generation, "slot rewritten under compute"
        words = world.directory.entry[world.directory.entry != ABSENT]
        resident = [entry_slot(int(word)) for word in words]
        assert world.residency.figures()[counters.RESIDENT_EXPERTS] == len(resident)
        reads = [r for r in world.residency.queue.reads.values() if r.begun]
        filling = [r.slot for r in reads]
        arriving = world.directory.arriving[world.directory.arriving != ABSENT]
        assert sorted(entry_slot(int(word)) for word in arriving) == sorted(filling)
        assert len(set(resident + filling)) == len(resident) + len(filling), "slot used twice"
        assert len(resident) + len(filling) + world.residency.slots.coming == world.slots
        for read in world.residency.queue.reads.values():
            assert world.directory.entry[read.key] == ABSENT, "resident and being read"
        pieces = [(o.read.key, o.piece.offset) for o in world.residency.queue.orders.values()]
        assert len(set(pieces)) == len(pieces), "a piece is with two readers"
