"""A compute process without a model: demands experts, reads every byte of their slots slowly, and
compares each tensor's checksum with the file's. Run as `python -m tests.ipc.slot_reader JSON`.

Prints one JSON line of what it did; ends with exit code 1 and a line on stderr at the first byte
that is not the file's, 2 where experts do not come. `lets_go_early` is the defect that the epoch
prevents: it says that it is done with its slots while it still reads them.
"""

from __future__ import annotations

import json
import random
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import zmq

from protocol.config import ModelConfig
from protocol.early_copies import EarlySender
from protocol.layouts import (
    ABSENT,
    PLACES,
    Arena,
    Directory,
    Progress,
    entry_slot,
    full_fence,
    look_up,
)
from protocol.messages import Demand, DemandFailed, Hint, Landed
from protocol.shards import Shards
from protocol.tensor_table import expert_tensor
from protocol.transport import Channel

WAIT_S = 20.0


@dataclass
class Work:
    """What the test wants."""

    endpoint: str
    checkpoint: str
    arena_fd: int
    directory_fd: int
    progress_fd: int
    steps: int
    seed: int
    experts: int = 6  # of each layer, so that much is used again
    layers: int = 2
    picks: int = 4
    pause: float = 0.002
    lets_go_early: bool = False


class SlotReader:
    """Goes layer by layer as compute does."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.chance = random.Random(work.seed)
        self.arena = Arena.attach(work.arena_fd)
        self.directory = Directory.attach(work.directory_fd)
        self.progress = Progress.attach(work.progress_fd)
        self.early_demands = EarlySender(self.progress.demands)
        checkpoint = Path(work.checkpoint)
        self.shards = Shards.open(checkpoint, ModelConfig.load(checkpoint))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel = Channel.connect(context, work.endpoint, "compute", (Landed, DemandFailed))
        self.demand = 0
        self.figures = {"hits": 0, "misses": 0, "checked": 0, "announced_twice": 0}
        self.landed: dict[int, set[int]] = {}

    def run(self) -> None:
        for step in range(self.work.steps):
            for layer in range(self.work.layers):
                self.one_layer(step, layer)
        print(json.dumps(self.figures), flush=True)

    def one_layer(self, step: int, layer: int) -> None:
        work = self.work
        picks = self.chance.sample(range(work.experts), work.picks)
        guess = self.chance.sample(range(work.experts), 2)
        ahead = (layer + 1) % work.layers
        if self.chance.random() < 0.5:
            # The other half is lost, as hints may be: then a hit looks old enough to evict.
            self.channel.send(Hint(step, layer, picks, ahead, guess, [1.0, 0.5]))
        self.let_go()
        waiting = dict.fromkeys(picks)
        missing = [e for e in picks if self.look_up(layer, e) == ABSENT]
        self.figures["misses"] += len(missing)
        self.figures["hits"] += len(picks) - len(missing)
        if missing:
            self.ask(layer, missing)
        deadline = time.monotonic() + WAIT_S
        while waiting:
            here = [e for e in waiting if self.look_up(layer, e) != ABSENT]
            for expert in here:
                if self.read_slowly(layer, expert):
                    del waiting[expert]
            if waiting and not here:
                self.hear(0.002)
                self.let_go()
                # A hit may have been evicted before it was read.
                gone = [e for e in waiting if e not in missing]
                if gone:
                    missing += gone
                    self.ask(layer, gone)
                if time.monotonic() > deadline:
                    sys.exit(2)
        self.progress.words[Progress.DEMAND_DONE] = self.demand
        self.let_go()

    def ask(self, layer: int, experts: list[int]) -> None:
        self.demand += 1
        frame = Demand(self.demand, layer, experts).encode()
        self.early_demands.put(frame)
        self.channel.send_frame(frame)

    def hear(self, seconds: float) -> None:
        first = self.channel.receive(seconds)
        for _, message in [first, *self.channel.drain()] if first else []:
            if isinstance(message, Landed):
                known = self.landed.setdefault(message.demand, set())
                self.figures["announced_twice"] += len(known & set(message.experts))
                known.update(message.experts)
            elif isinstance(message, DemandFailed):
                sys.exit(message.reason)

    def look_up(self, layer: int, expert: int) -> int:
        return look_up(self.directory, self.arena, layer, [expert])[0]

    def let_go(self) -> None:
        full_fence()
        self.progress.words[Progress.EPOCH] += 1
        full_fence()

    def read_slowly(self, layer: int, expert: int) -> bool:
        """False where it has been evicted since it was seen."""
        word = self.look_up(layer, expert)
        if word == ABSENT:
            return False
        slot = entry_slot(word)
        places = self.directory.place[layer, expert].tolist()
        for place, begin in zip(PLACES, places, strict=True):
            if self.work.lets_go_early:
                self.let_go()
            time.sleep(self.work.pause * self.chance.random())
            name = expert_tensor(layer, expert, *place.split("."))
            nbytes = self.shards.tensors[name].nbytes
            found = self.arena.data[slot, begin : begin + nbytes].tobytes()
            if zlib.crc32(found) != self.checksum(name):
                sys.exit(f"slot {slot} does not hold {name}")
        if int(self.directory.generation[slot]) != word >> 32:
            sys.exit(f"slot {slot} was given away while it was read")
        self.figures["checked"] += 1
        return True

    def checksum(self, name: str) -> int:
        entry = self.shards.tensors[name]
        with entry.path.open("rb") as file:
            file.seek(entry.offset)
            return zlib.crc32(file.read(entry.nbytes))


if __name__ == "__main__":
    SlotReader(Work(**json.loads(sys.argv[1]))).run()
