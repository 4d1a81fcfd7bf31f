"""Routed experts in device memory, copied from the arena: the tier in front of it.

Owns the device's expert slots and which expert lies in which. Promises: a hit asks nobody; a copy
runs on a stream of its own and what is launched after `place` waits for it, the host does not; an
arena slot is held until the copies and kernels that read it are done. Where the device reads the
arena about as fast as its own memory (`in_place`), the arena alone serves.

Which slot to give up is decided as in the arena, by recency with a random victim among the oldest:
a cycle of slightly more experts than fit would otherwise miss every time.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from compute.slot_views import HeldExpert, tensor_shapes
from compute.sources import Addresses, ExpertBytes, ExpertSource
from protocol import counters
from protocol.config import ModelConfig
from protocol.errors import HeadraceError

# Order and form of the kernels' addresses, by place in `protocol.layouts.PLACES`.
_KERNEL_ORDER = (0, 3, 1, 4, 2, 5)
ALIGNMENT = 16
OLDEST_SHARE = 0.08
MOST_OLDEST = 256

Key = tuple[int, int]  # (layer, expert)


class HoldingSource(ExpertSource, Protocol):
    """What the tier asks of the arena's source."""

    def hold(self, layer: int, experts: Sequence[int]) -> list[HeldExpert]:
        """All of `experts` at once, where they lie, until the next `release`. Raises ReadError and
        StallError as `fetch` does."""
        ...

    def read_until(self, event: torch.cuda.Event) -> None:
        """The device reads slots held now until `event`, which has been recorded."""
        ...


class DeviceExperts:
    """A PlacedExperts over `slots` of device memory, at least twice a layer's picks.

    `counts` has hits of the device's own slots and copies into them, by protocol.counters' names.
    """

    def __init__(
        self,
        arena: HoldingSource,
        config: ModelConfig,
        device: torch.device,
        slots: int,
        *,
        in_place: bool = False,
        seed: int = 0,
    ) -> None:
        if slots < 2 * config.num_experts_per_tok:
            raise HeadraceError(
                f"{slots} expert slots in device memory, expected at least "
                f"{2 * config.num_experts_per_tok}"
            )
        self._arena = arena
        self._in_place = in_place
        self._shapes = tensor_shapes(config)
        self._sizes = [rows * width for rows, width in self._shapes]
        starts = [sum(self._sizes[:at]) for at in range(len(self._sizes))]
        self._slots = torch.empty((slots, sum(self._sizes)), dtype=torch.uint8, device=device)
        base, row = self._slots.data_ptr(), self._slots.stride(0)
        self._addresses = np.array(
            [[base + slot * row + starts[at] for at in _KERNEL_ORDER] for slot in range(slots)]
        )
        self._slot_of: OrderedDict[Key, int] = OrderedDict()
        self._free = list(range(slots))
        self._random = random.Random(seed)
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._copying = torch.cuda.Stream(device)
        self.counts = {counters.DEVICE_HITS: 0.0, counters.DEVICE_COPIES: 0.0}

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert."""
        return self._slots.shape[1]

    def forget(self, layer: int, expert: int) -> None:
        """Give up the slot of an expert, if it has one: for measuring misses."""
        slot = self._slot_of.pop((layer, expert), None)
        if slot is not None:
            self._free.append(slot)

    @property
    def way(self) -> str:
        """Where decode steps read experts, in words."""
        return "read in place" if self._in_place else f"{len(self._slots)} slots on the device"

    @property
    def resident(self) -> int:
        """How many experts lie in device memory."""
        return len(self._slot_of)

    def placed(self, layer: int, experts: Sequence[int]) -> Addresses | None:
        keys = [(layer, expert) for expert in experts]
        slots = [self._slot_of.get(key, -1) for key in keys]
        if -1 in slots:
            return None
        for key in keys:
            self._slot_of.move_to_end(key)
        self.counts[counters.DEVICE_HITS] += len(keys)
        return self._addresses[slots]

    def place(self, layer: int, experts: Sequence[int]) -> Addresses:
        keys = [(layer, expert) for expert in experts]
        missing = [key for key in keys if key not in self._slot_of]
        for key in keys:
            if key in self._slot_of:
                self._slot_of.move_to_end(key)
        self.counts[counters.DEVICE_HITS] += len(keys) - len(missing)
        direct: dict[Key, list[int]] = {}
        if missing:
            held = self._arena.hold(layer, [expert for _, expert in missing])
            direct = self._take_in(dict(zip(missing, held, strict=True)), keys)
        return np.array(
            [direct[key] if key in direct else self._addresses[self._slot_of[key]] for key in keys]
        )

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertBytes]]:
        """As ExpertSource: what is here from here, the rest as the arena's source gives it, without
        a place here: a prefill's experts are too many to be worth keeping."""
        here = [expert for expert in experts if (layer, expert) in self._slot_of]
        rest = [expert for expert in experts if (layer, expert) not in self._slot_of]
        arriving = self._arena.fetch(layer, rest)
        return self._arrivals(layer, here, arriving)

    def hint(
        self,
        layer: int,
        picks: Sequence[int],
        predicted_layer: int | None,
        predicted: Sequence[int],
        scores: Sequence[float],
    ) -> None:
        # What lies here already need not be read from disk.
        if predicted_layer is not None:
            wanted = [
                (expert, score)
                for expert, score in zip(predicted, scores, strict=True)
                if (predicted_layer, expert) not in self._slot_of
            ]
            predicted, scores = [e for e, _ in wanted], [s for _, s in wanted]
        self._arena.hint(layer, picks, predicted_layer, predicted, scores)

    def release(self) -> None:
        if self._on_gpu and self._in_place:
            done = torch.cuda.Event()
            done.record()
            self._arena.read_until(done)
        self._arena.release()

    def _arrivals(
        self, layer: int, here: list[int], arriving: Iterator[tuple[int, ExpertBytes]]
    ) -> Iterator[tuple[int, ExpertBytes]]:
        for expert in here:
            yield expert, self._opened(self._slot_of[layer, expert])
        yield from arriving

    def _opened(self, slot: int) -> ExpertBytes:
        parts = self._slots[slot].split(self._sizes)
        ordered = [parts[at].view(self._shapes[at]) for at in _KERNEL_ORDER]
        return ExpertBytes(*ordered)

    def _take_in(self, held: dict[Key, HeldExpert], keep: Sequence[Key]) -> dict[Key, list[int]]:
        """Copy what is `held` into slots, none of them those of `keep`; addresses of what is rather
        read where it lies."""
        direct: dict[Key, list[int]] = {}
        if self._in_place:
            for key, expert in held.items():
                base = expert.memory.data_ptr()
                addresses = [base + expert.place[part] for part in _KERNEL_ORDER]
                # A shard whose header is no multiple of 16 leaves tensors that kernels cannot read.
                if all(address % ALIGNMENT == 0 for address in addresses):
                    direct[key] = addresses
        to_copy = {key: expert for key, expert in held.items() if key not in direct}
        if to_copy and self._on_gpu:
            # What still reads a slot that is given up was launched before.
            self._copying.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copying):
                self._copy(to_copy, keep)
                copied = torch.cuda.Event()
                copied.record()
            torch.cuda.current_stream().wait_event(copied)
            self._arena.read_until(copied)
        elif to_copy:
            self._copy(to_copy, keep)
        return direct

    def _copy(self, held: dict[Key, HeldExpert], keep: Sequence[Key]) -> None:
        for key, expert in held.items():
            slot = self._empty_slot(keep)
            into = self._slots[slot]
            for start, begin, size in self._runs(expert.place):
                part = expert.memory[begin : begin + size]
                into[start : start + size].copy_(part, non_blocking=True)
            self._slot_of[key] = slot
        self.counts[counters.DEVICE_COPIES] += len(held)

    def _runs(self, place: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(offset here, offset in the arena's slot, bytes) of tensors that are neighbours there."""
        start = at = 0
        while at < len(place):
            begin, size = place[at], self._sizes[at]
            while at + 1 < len(place) and place[at + 1] == begin + size:
                at += 1
                size += self._sizes[at]
            yield start, begin, size
            start += size
            at += 1

    def _empty_slot(self, keep: Sequence[Key]) -> int:
        if self._free:
            return self._free.pop()
        count = min(MOST_OLDEST, max(1, int(len(self._slot_of) * OLDEST_SHARE)))
        skip = self._random.randrange(count)
        oldest = (key for key in islice(self._slot_of, skip, None) if key not in keep)
        victim = next(oldest, None) or next(key for key in self._slot_of if key not in keep)
        return self._slot_of.pop(victim)
