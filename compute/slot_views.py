"""An arena slot as the tensors of one expert, where the computing device can read them.

On CPU they are views of the shared memory itself. On CUDA a slot is copied to a staging buffer, and
a slot may be rewritten once that copy is done, however long the products take.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from compute.formats import GROUP
from compute.sources import ExpertBytes
from protocol.config import ModelConfig
from protocol.layouts import PLACES, Arena

# Field of ExpertBytes for each entry of PLACES.
_FIELDS = tuple(name.replace(".weight", "").replace(".scale", "_scale") for name in PLACES)
# cudaHostRegister fails on half a TiB in one call.
_REGISTER_BYTES = 8 << 30
_STAGING_BUFFERS = 4


class HeldExpert(NamedTuple):
    """One expert in its arena slot: uint8 `memory` [slot_bytes] on the host, and the byte offsets
    of its tensors in the order of PLACES."""

    memory: torch.Tensor
    place: Sequence[int]


class SlotViews(Protocol):
    """Opens slots one at a time; an item is readable until the next is opened. `way` says in words
    how the bytes reach the device."""

    way: str

    def open(self, slot: int, place: Sequence[int]) -> ExpertBytes:
        """The expert in `slot`, its tensors at byte offsets `place` in the order of PLACES."""
        ...

    def in_place(self, slot: int, place: Sequence[int]) -> HeldExpert:
        """The expert in `slot` where it lies; who reads it later says so with `read_until`."""
        ...

    def read_until(self, event: torch.cuda.Event) -> None:
        """The device reads slots opened in place until `event`, which has been recorded."""
        ...

    def idle(self) -> bool:
        """Whether the device reads no slot any more, asked without waiting."""
        ...

    def wait_idle(self) -> None:
        """Wait until the device reads no slot any more."""
        ...


def slot_views(
    arena: Arena, config: ModelConfig, device: torch.device, *, pin: bool = True
) -> SlotViews:
    """The way `device` reads `arena`; `pin` registers it with a GPU."""
    if device.type == "cuda":
        return StagedSlots(arena, config, device, pin)
    return HostSlots(arena, config)


class HostSlots:
    """Views of the shared memory; the CPU has read them when the caller's products return."""

    way = "read in place"

    def __init__(self, arena: Arena, config: ModelConfig) -> None:
        self._bytes = torch.from_numpy(arena.data).view(-1)
        self._slot_bytes = arena.slot_bytes
        self._shapes = _shapes(config)
        # By slot: making six tensors costs more than all else about a hit.
        self._opened: dict[int, tuple[Sequence[int], ExpertBytes]] = {}

    def open(self, slot: int, place: Sequence[int]) -> ExpertBytes:
        opened = self._opened.get(slot)
        if opened is None or opened[0] != place:
            views = _carve(self._bytes, slot * self._slot_bytes, place, self._shapes)
            opened = self._opened[slot] = place, views
        return opened[1]

    def in_place(self, slot: int, place: Sequence[int]) -> HeldExpert:
        begin = slot * self._slot_bytes
        return HeldExpert(self._bytes[begin : begin + self._slot_bytes], place)

    def read_until(self, event: torch.cuda.Event) -> None:
        """Only a GPU reads behind the caller's back."""

    def idle(self) -> bool:
        return True

    def wait_idle(self) -> None:
        """Nothing runs behind the caller's back."""


class StagedSlots:
    """Copies on a stream of their own, so that the next expert comes while one is computed."""

    def __init__(self, arena: Arena, config: ModelConfig, device: torch.device, pin: bool) -> None:
        pinned = pin and _register(arena)
        self.way = (
            "copied from pinned memory" if pinned else "copied from memory that is not pinned"
        )
        self._slots = torch.from_numpy(arena.data)
        self._shapes = _shapes(config)
        self._device = device
        self._buffers = torch.empty(
            (_STAGING_BUFFERS, arena.slot_bytes), dtype=torch.uint8, device=device
        )
        self._copying = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()
        # After which the products that read a buffer are done.
        self._read = [torch.cuda.Event() for _ in range(_STAGING_BUFFERS)]
        self._current = 0
        self._elsewhere: list[torch.cuda.Event] = []

    def in_place(self, slot: int, place: Sequence[int]) -> HeldExpert:
        return HeldExpert(self._slots[slot], place)

    def read_until(self, event: torch.cuda.Event) -> None:
        self._elsewhere.append(event)

    def open(self, slot: int, place: Sequence[int]) -> ExpertBytes:
        computing = torch.cuda.current_stream(self._device)
        # Opening the next item means that all products of the one before have been issued.
        self._read[self._current].record(computing)
        self._current = (self._current + 1) % _STAGING_BUFFERS
        buffer = self._buffers[self._current]
        self._copying.wait_event(self._read[self._current])
        with torch.cuda.stream(self._copying):
            buffer.copy_(self._slots[slot], non_blocking=True)
            self._copied.record(self._copying)
        computing.wait_event(self._copied)
        base = self._current * buffer.nbytes
        return _carve(self._buffers.view(-1), base, place, self._shapes)

    def idle(self) -> bool:
        self._elsewhere = [event for event in self._elsewhere if not event.query()]
        return not self._elsewhere and bool(self._copied.query())

    def wait_idle(self) -> None:
        for event in self._elsewhere:
            event.synchronize()
        self._elsewhere.clear()
        self._copied.synchronize()


def _shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and bytes a row of each tensor of an expert, by PLACES name."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    sides = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    per_byte = {"weight": 2, "scale": GROUP}
    shapes = {}
    for name in PLACES:
        matrix, part = name.split(".")
        rows, columns = sides[matrix]
        shapes[name] = (rows, columns // per_byte[part])
    return shapes


def tensor_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Rows and bytes a row of an expert's tensors, in the order of PLACES."""
    return list(_shapes(config).values())


def zero_expert(config: ModelConfig, device: torch.device) -> ExpertBytes:
    """An expert of zeros, in memory of its own."""
    tensors = {
        field: torch.zeros(shape, dtype=torch.uint8, device=device)
        for field, shape in zip(_FIELDS, _shapes(config).values(), strict=True)
    }
    return ExpertBytes(**tensors)


def _carve(
    memory: torch.Tensor, base: int, place: Sequence[int], shapes: dict[str, tuple[int, int]]
) -> ExpertBytes:
    # `as_strided` counts from the beginning of the storage, whatever view it is called on.
    tensors = {
        field: memory.as_strided(shape, (shape[1], 1), base + offset)
        for field, shape, offset in zip(_FIELDS, shapes.values(), place, strict=True)
    }
    return ExpertBytes(**tensors)


def _register(arena: Arena) -> bool:
    """Have the device's copy engine reach the arena. False where the system refuses to lock it:
    copies then take a detour through the driver's own buffers and stay right."""
    runtime = torch.cuda.cudart()
    begin = arena.data.ctypes.data
    for offset, size in registered_pieces(arena.slots, arena.slot_bytes):
        if int(runtime.cudaHostRegister(begin + offset, size, 0)) != 0:
            return False
    return True


def registered_pieces(slots: int, slot_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of what is registered in one call: whole slots, since no copy may cross from
    one registration into another, and whole pages, since none may be registered twice."""
    together = mmap.PAGESIZE // math.gcd(slot_bytes, mmap.PAGESIZE)
    step = max(_REGISTER_BYTES // slot_bytes // together, 1) * together
    for first in range(0, slots, step):
        yield first * slot_bytes, min(step, slots - first) * slot_bytes
