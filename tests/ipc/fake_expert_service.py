"""A minimal expert service in a process of its own, for what the real one must never do.

It serves demands from a checkpoint's shards into a shared arena, one read at a time, and evicts as
much as it is told to: a test's arena is under pressure. `silent`, `fail` and `ignore_epoch` break
it on purpose. Run as `python -m tests.ipc.fake_expert_service JSON`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from protocol.config import ModelConfig
from protocol.layouts import (
    ABSENT,
    PLACES,
    Arena,
    Directory,
    Progress,
    full_fence,
    pack_entry,
)
from protocol.messages import Demand, DemandFailed, Hint, Landed
from protocol.shards import Shards
from protocol.tensor_table import expert_tensor
from protocol.transport import Channel

COMPUTE = "compute"


@dataclass
class Orders:
    """What the test wants of the service."""

    endpoint: str
    checkpoint: str
    arena_fd: int
    directory_fd: int
    progress_fd: int
    reserve: int = 1
    delay: float = 0.0  # seconds a read takes at most; random below it
    restless: float = 0.0  # probability a turn of evicting though nothing asks for it
    silent: bool = False  # takes demands and never answers
    ignore_epoch: bool = False  # reuses a slot at once: the defect that reclamation prevents
    fail: list[int] = field(default_factory=list)  # layer, expert, times
    log: str = ""  # file that gets one line a message


class FakeExpertService:
    """Single-threaded: a turn takes messages, reclaims, evicts, and serves one expert."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        config = ModelConfig.load(Path(orders.checkpoint))
        self.shards = Shards.open(Path(orders.checkpoint), config)
        self.arena = Arena.attach(orders.arena_fd)
        self.directory = Directory.attach(orders.directory_fd)
        self.progress = Progress.attach(orders.progress_fd)
        self.random = random.Random(3)
        self.free = list(range(self.arena.slots))
        self.limbo: deque[tuple[int, int]] = deque()
        self.resident: OrderedDict[tuple[int, int], int] = OrderedDict()
        self.protected: dict[int, Demand] = {}
        self.wanted: deque[tuple[int, int, int]] = deque()
        self.answered: dict[int, set[int]] = {}
        offset, sizes = 0, []
        for name in PLACES:
            matrix, part = name.split(".")
            sizes.append(self.shards.tensors[expert_tensor(0, 0, matrix, part)].nbytes)
        for index, size in enumerate(sizes):
            self.directory.place[:, :, index] = offset
            offset += size
        self.directory.entry[:] = self.directory.arriving[:] = ABSENT

    def run(self) -> None:
        """Serve until killed, or until the test's process has ended."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        channel = Channel.bind(context, self.orders.endpoint, (Demand, Hint))
        print("ready", flush=True)
        parent = os.getppid()
        while os.getppid() == parent:
            received = channel.receive(0.001 if not self.wanted else 0)
            if received is not None:
                self.take(received[1])
            self.reclaim()
            self.evict()
            if self.wanted and not self.orders.silent:
                self.serve(channel)

    def take(self, message: object) -> None:
        if self.orders.log:
            with open(self.orders.log, "a", encoding="utf-8") as file:
                file.write(f"{message}\n")
        if isinstance(message, Demand):
            answered = self.answered.setdefault(message.demand, set())
            new = message.demand not in self.protected
            self.protected[message.demand] = message
            for expert in message.experts:
                if new and expert not in answered:
                    self.wanted.append((message.demand, message.layer, expert))

    def reclaim(self) -> None:
        words = self.progress.words
        done, epoch = int(words[Progress.DEMAND_DONE]), int(words[Progress.EPOCH])
        for demand in [d for d in self.protected if d <= done]:
            del self.protected[demand]
        self.wanted = deque(w for w in self.wanted if w[0] > done)
        while self.limbo and (epoch > self.limbo[0][1] or self.orders.ignore_epoch):
            self.free.append(self.limbo.popleft()[0])

    def evict(self) -> None:
        restless = self.random.random() < self.orders.restless
        if not restless and len(self.free) + len(self.limbo) > self.orders.reserve:
            return
        guarded = {(d.layer, e) for d in self.protected.values() for e in d.experts}
        victims = [key for key in self.resident if key not in guarded]
        if not victims:
            return
        key = self.random.choice(victims)
        slot = self.resident.pop(key)
        self.directory.entry[key] = ABSENT
        full_fence()
        self.limbo.append((slot, int(self.progress.words[Progress.EPOCH])))
        if self.orders.ignore_epoch:
            self.scribble(slot)

    def serve(self, channel: Channel) -> None:
        demand, layer, expert = self.wanted[0]
        if (layer, expert) not in self.resident:
            if self.orders.fail[:2] == [layer, expert] and self.orders.fail[2] > 0:
                self.orders.fail[2] -= 1
                self.wanted.popleft()
                channel.send(DemandFailed(demand, expert, "shard 7: Input/output error"), COMPUTE)
                return
            if not self.free:
                return
            slot = self.free.pop(self.random.randrange(len(self.free)))
            self.read(slot, layer, expert)
        self.wanted.popleft()
        self.answered[demand].add(expert)
        channel.send(Landed(demand, [expert]), COMPUTE)

    def scribble(self, slot: int) -> None:
        """What a read that has begun leaves of the slot's earlier bytes."""
        self.directory.generation[slot] += 1
        self.arena.data[slot] = 0x5A

    def read(self, slot: int, layer: int, expert: int) -> None:
        self.scribble(slot)
        if self.orders.delay:
            time.sleep(self.random.random() * self.orders.delay)
        for index, name in enumerate(PLACES):
            entry = self.shards.tensors[expert_tensor(layer, expert, *name.split("."))]
            begin = int(self.directory.place[layer, expert, index])
            with entry.path.open("rb") as file:
                file.seek(entry.offset)
                file.readinto(self.arena.data[slot, begin : begin + entry.nbytes])  # type: ignore[arg-type]
        self.resident[layer, expert] = slot
        word = pack_entry(slot, int(self.directory.generation[slot]))
        full_fence()
        self.directory.entry[layer, expert] = word


if __name__ == "__main__":
    FakeExpertService(Orders(**json.loads(sys.argv[1]))).run()
