"""Routed experts in device memory, copied from the arena: the tier in front of it.

Owns the device's expert slots and which expert lies in which. Promises: a hit asks nobody; a copy
runs on a stream of its own and what is launched after `place` waits for it, the host does not; an
arena slot is held until the copies and kernels that read it are done. Where the device reads the
arena about as fast as its own memory (`in_place`), the arena alone serves.

Which slot to give up is decided as in the arena, by recency with a random victim among the oldest:
a cycle of slightly more experts than fit would otherwise miss every time.

The device looks experts up by itself in `slots`, a table that is sent to it as a token begins. What
it says of a layer holds until the layer is placed, unless an expert was given up; the host knows.
While a token runs as one graph, only slots of layers it has passed are given up, or such as
`make_room` left free, and `bring` waits for nothing that runs.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice, repeat
from typing import NamedTuple, Protocol

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

    def hold(
        self, layer: int, experts: Sequence[int], asking: Callable[[], None] | None = None
    ) -> list[HeldExpert]:
        """All of `experts` at once, where they lie, until the next `release`; `asking` is called
        before anybody is asked. Raises ReadError and StallError as `fetch` does."""
        ...

    def read_until(self, event: torch.cuda.Event) -> None:
        """The device reads slots held now until `event`, which has been recorded."""
        ...


class DeviceSlots(NamedTuple):
    """Where the device finds experts by itself: `of` int32 [layers, experts], an expert's slot, -1
    where it has none; `first` int64 [6]: where the tensors of slot 0 lie, in the kernels' order,
    those of others `slot_bytes` apart each."""

    of: torch.Tensor
    first: torch.Tensor
    slot_bytes: int


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
    ) -> None:
        if slots < 2 * config.num_experts_per_tok:
            raise HeadraceError(
                f"{slots} expert slots in device memory, expected at least "
                f"{2 * config.num_experts_per_tok}"
            )
        self._arena = arena
        self._in_place = in_place
        layers = config.num_hidden_layers
        self._every = layers * config.n_routed_experts
        self._shapes = tensor_shapes(config)
        self._sizes = [rows * width for rows, width in self._shapes]
        starts = [sum(self._sizes[:at]) for at in range(len(self._sizes))]
        self._slots = torch.empty((slots, sum(self._sizes)), dtype=torch.uint8, device=device)
        self._of_slot = self._slots.unbind()  # made once: a waiting token's copies need them
        base, row = self._slots.data_ptr(), self._slots.stride(0)
        self._addresses = np.array(
            [[base + slot * row + starts[at] for at in _KERNEL_ORDER] for slot in range(slots)]
        )
        self._slot_of: OrderedDict[Key, int] = OrderedDict()
        self._free = list(range(slots))
        # Enough for the first layer, before a running token has passed one; and for a usual token.
        self._spare = max(config.num_experts_per_tok, min(layers, slots // 8))
        self._random = random.Random(0)
        self._on_gpu = device.type == "cuda"
        # An expert's slot, -1 where it has none; and what the device knows of it.
        self._host_table = torch.full(
            (layers, config.n_routed_experts), -1, dtype=torch.int32, pin_memory=self._on_gpu
        )
        self._table = self._host_table.numpy()
        self.slots = DeviceSlots(
            torch.full_like(self._host_table, -1, device=device),
            torch.tensor(self._addresses[0], device=device),
            self._slots.shape[1],
        )
        if self._on_gpu:
            self._copying = torch.cuda.Stream(device)
        self.counts = {counters.DEVICE_HITS: 0.0, counters.DEVICE_COPIES: 0.0}

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert."""
        return self.slots.slot_bytes

    def send_slots(self) -> None:
        """Put into `slots` what lies where, before a token, on the current stream."""
        self.slots.of.copy_(self._host_table, non_blocking=True)

    def hide(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Take those of `keys` that are here for absent until `show`: for measuring misses."""
        return {key: self._give_up(key) for key in keys if key in self._slot_of}

    def show(self, hidden: Mapping[Key, int]) -> None:
        """What `hide` returned is here again; what was missed meanwhile gives one of its slots
        back."""
        for key, slot in hidden.items():
            if key in self._slot_of:
                self._free.append(slot)
            else:
                self._lies(key, slot)

    @property
    def way(self) -> str:
        """Where decode steps read experts, in words."""
        return "read in place" if self._in_place else f"{len(self._slots)} slots on the device"

    @property
    def resident(self) -> int:
        """How many experts lie in device memory."""
        return len(self._slot_of)

    def holds(self, layer: int, experts: Sequence[int]) -> bool:
        """Whether all of them lie in device memory, where the device finds them by itself."""
        # Without a generator, since a launch waits for it.
        return all(map(self._slot_of.__contains__, zip(repeat(layer), experts)))

    def used(self, layer: int, experts: Sequence[int]) -> None:
        """Note that a token reads `experts`, which are held."""
        for expert in experts:
            self._slot_of.move_to_end((layer, expert))
        self.counts[counters.DEVICE_HITS] += len(experts)

    def place(
        self, layer: int, experts: Sequence[int], asking: Callable[[], None] | None = None
    ) -> Addresses:
        return self._bring(layer, experts, asking, running=False)

    def bring(self, layer: int, experts: Sequence[int], asking: Callable[[], None]) -> Addresses:
        """As `place`, inside `serving`, for a token that is running and waits at `layer`: addresses
        to be read once what is enqueued next is done. `asking` as in `HoldingSource.hold`."""
        return self._bring(layer, experts, asking, running=True)

    def serving(self) -> AbstractContextManager[object]:
        """What is enqueued inside is done after all copies up to then, and waits for no token that
        runs."""
        return torch.cuda.stream(self._copying) if self._on_gpu else nullcontext()

    def join_copies(self) -> None:
        """What is launched next waits for all copies, answered or not."""
        if self._on_gpu:
            torch.cuda.current_stream().wait_stream(self._copying)

    def make_room(self) -> None:
        """Before a token runs: leave slots free for what it will miss."""
        while len(self._free) < min(self._spare, self._every - len(self._slot_of)):
            self._free.append(self._give_up(self._victim(lambda key: True)))

    def passed(self) -> None:
        """A running token is past the layer before, and reads no slot of the arena."""
        self._arena.release()

    def _bring(
        self,
        layer: int,
        experts: Sequence[int],
        asking: Callable[[], None] | None,
        *,
        running: bool,
    ) -> Addresses:
        keys = [(layer, expert) for expert in experts]
        missing = [key for key in keys if key not in self._slot_of]
        direct: dict[Key, list[int]] = {}
        if missing:
            held = self._arena.hold(layer, [expert for _, expert in missing], asking)
            direct = self._take_in(dict(zip(missing, held, strict=True)), keys, running)
        # Once the copies are under way: a token may be waiting for them.
        self.used(layer, [expert for expert in experts if (layer, expert) not in missing])
        return np.array(
            [direct[key] if key in direct else self._addresses[self._slot_of[key]] for key in keys]
        )

    def present(self, layer: int, experts: Sequence[int]) -> tuple[list[int], Addresses]:
        here = [expert for expert in experts if (layer, expert) in self._slot_of]
        return here, self._addresses[[self._slot_of[layer, expert] for expert in here]]

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
        parts = self._of_slot[slot].split(self._sizes)
        ordered = [parts[at].view(self._shapes[at]) for at in _KERNEL_ORDER]
        return ExpertBytes(*ordered)

    def _take_in(
        self, held: dict[Key, HeldExpert], keep: Sequence[Key], running: bool
    ) -> dict[Key, list[int]]:
        """Copy what is `held` into slots, none of them those of `keep`; addresses of what is rather
        read where it lies."""
        layer = keep[0][0]

        def may_go(key: Key) -> bool:
            return key[0] < layer if running else key not in keep

        direct: dict[Key, list[int]] = {}
        if self._in_place:
            for key, expert in held.items():
                base = expert.memory.data_ptr()
                addresses = [base + expert.place[part] for part in _KERNEL_ORDER]
                # A shard whose header is no multiple of 16 leaves tensors that kernels cannot read.
                if all(address % ALIGNMENT == 0 for address in addresses):
                    direct[key] = addresses
        to_copy = {key: expert for key, expert in held.items() if key not in direct}
        if to_copy and running:
            self._copy(to_copy, may_go)
        elif to_copy:
            with self.serving():
                self._copy(to_copy, may_go)
            self.join_copies()
        return direct

    def _copy(self, held: dict[Key, HeldExpert], may_go: Callable[[Key], bool]) -> None:
        for key, expert in held.items():
            slot = self._free.pop() if self._free else self._give_up(self._victim(may_go))
            into = self._of_slot[slot]
            for start, begin, size in self._runs(expert.place):
                part = expert.memory[begin : begin + size]
                into[start : start + size].copy_(part, non_blocking=True)
            self._lies(key, slot)
        if self._on_gpu:
            copied = torch.cuda.Event()
            copied.record()
            self._arena.read_until(copied)
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

    def _lies(self, key: Key, slot: int) -> None:
        self._slot_of[key] = slot
        self._table[key] = slot

    def _give_up(self, key: Key) -> int:
        """The slot that `key` had."""
        self._table[key] = -1
        return self._slot_of.pop(key)

    def _victim(self, may_go: Callable[[Key], bool]) -> Key:
        count = min(MOST_OLDEST, max(1, int(len(self._slot_of) * OLDEST_SHARE)))
        skip = self._random.randrange(count)
        oldest = (key for key in islice(self._slot_of, skip, None) if may_go(key))
        return next(oldest, None) or next(key for key in self._slot_of if may_go(key))
