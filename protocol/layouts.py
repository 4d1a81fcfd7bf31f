"""Every shared-memory layout: the arena, the directory, compute's progress, the engram ring, and
the cells in which a message stands before it has come.

A region is a memfd: it has no name, is passed by descriptor, and vanishes with its last holder.
Its first page is a header with a magic number, a version, a kind and the geometry; whoever attaches
checks all of it against the memory's real size before using it.

Writers (one each): a piece of an arena slot and its word - the reader holding the order for it;
directory and early orders - the expert service; progress, early demands with it - compute; engram
ring - the engram service. Words of 8 aligned bytes are written and read whole; a payload is
complete before the word that publishes it is written.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from protocol.errors import HeadraceError, ResourceError
from protocol.huge_pages import use_huge_pages

PAGE = 4096
MAGIC = b"HEADRACE"
LAYOUT_VERSION = 3
_HEADER = struct.Struct("<8sII8q")

# Early copies of messages a receiver has not yet taken in: it is given two orders at most.
CELLS = 4
# A demand of as many experts as a token picks, an order for a piece, and room beyond.
CELL_BYTES = 512

Words = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Cells(NamedTuple):
    """Early copies of one sender's messages to one receiver (`protocol.early_copies`).

    `puts` int64 [1]: how many were put here. `heads` int64 [CELLS, 3]: of each cell a sequence
    number, odd while it is written, the receiver's incarnation, and how many bytes of `frames`
    uint8 [CELLS, CELL_BYTES] are the message.
    """

    puts: Words
    heads: Words
    frames: Bytes


_CELLS_BYTES = 8 + CELLS * (3 * 8 + CELL_BYTES)


def align_up(size: int, unit: int = PAGE) -> int:
    """The smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


_fence_lock = threading.Lock()


def full_fence() -> None:
    """Order the stores before it against the loads after it, between processes.

    Publishing an epoch and then reading the directory (or removing an entry and then reading the
    epoch) is a store followed by a load of another word, which processors may swap. CPython's lock
    is an atomic read-modify-write each way, and that is a full fence.
    """
    with _fence_lock:
        pass


class SharedRegion(ABC):
    """A mapped memfd with a checked header. Subclasses name their geometry and carve arrays.

    `huge_bytes` of it were put into huge pages by whoever created it; 0 where it was attached.
    """

    KIND: ClassVar[int]
    GEOMETRY: ClassVar[tuple[str, ...]]

    def __init__(
        self, fd: int, geometry: tuple[int, ...], *, create: bool, huge_pages: bool = True
    ) -> None:
        self.fd = fd
        for name, value in zip(self.GEOMETRY, geometry, strict=True):
            setattr(self, name, value)
        self.nbytes = PAGE + align_up(self.payload_bytes())
        self.huge_bytes = 0
        if create:
            self._allocate(geometry, huge_pages)
        self.memory = mmap.mmap(fd, self.nbytes)
        self._carve()

    @classmethod
    def create(cls, *, huge_pages: bool = True, **geometry: int) -> Self:
        """Allocate a region in full, in huge pages where the kernel gives them.

        Raises ResourceError where memory does not suffice.
        """
        values = tuple(geometry[name] for name in cls.GEOMETRY)
        fd = os.memfd_create(f"headrace-{cls.__name__.lower()}", os.MFD_CLOEXEC)
        try:
            return cls(fd, values, create=True, huge_pages=huge_pages)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map an inherited region. Raises HeadraceError where it is not what this build expects."""
        size = os.fstat(fd).st_size
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size:
            raise HeadraceError(f"shared memory of {cls.__name__}: {size} bytes, no header")
        magic, version, kind, *values = _HEADER.unpack(header)
        if (magic, version, kind) != (MAGIC, LAYOUT_VERSION, cls.KIND):
            raise HeadraceError(
                f"shared memory of {cls.__name__}: header {magic!r} {version} {kind}, expected "
                f"{MAGIC!r} {LAYOUT_VERSION} {cls.KIND}; all processes must be of one build"
            )
        geometry = tuple(values[: len(cls.GEOMETRY)])
        region = cls.__new__(cls)
        for name, value in zip(cls.GEOMETRY, geometry, strict=True):
            setattr(region, name, value)
        if any(v <= 0 for v in geometry) or PAGE + align_up(region.payload_bytes()) != size:
            raise HeadraceError(
                f"shared memory of {cls.__name__}: {size} bytes do not fit geometry "
                f"{dict(zip(cls.GEOMETRY, geometry, strict=True))}"
            )
        region.__init__(fd, geometry, create=False)  # type: ignore[misc]
        return region

    @abstractmethod
    def payload_bytes(self) -> int:
        """Bytes after the header page."""

    @abstractmethod
    def _carve(self) -> None:
        """Lay the arrays over `self.memory`."""

    def close(self) -> None:
        """Drop the arrays and the mapping; the memory goes when its last holder does."""
        for name in [n for n, v in vars(self).items() if isinstance(v, np.ndarray | Cells | list)]:
            delattr(self, name)
        # A caller may still hold a view; the mapping then lives until that view is dropped.
        with contextlib.suppress(BufferError):
            self.memory.close()
        os.close(self.fd)

    def _allocate(self, geometry: tuple[int, ...], huge_pages: bool) -> None:
        try:
            os.ftruncate(self.fd, self.nbytes)
            if huge_pages:
                self.huge_bytes = use_huge_pages(self.fd, self.nbytes)
            # Without this a later touch of a page that memory has no room for is a bus error.
            os.posix_fallocate(self.fd, 0, self.nbytes)
        except OSError as error:
            raise ResourceError(
                f"cannot allocate {self.nbytes} bytes of shared memory ({error.strerror}); "
                "ask for fewer slots"
            ) from None
        padded = (*geometry, *([0] * (8 - len(geometry))))
        os.pwrite(self.fd, _HEADER.pack(MAGIC, LAYOUT_VERSION, self.KIND, *padded), 0)

    def _array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        # Unlike np.ndarray(buffer=...), this keeps the mapping from being closed under a view.
        flat = np.frombuffer(self.memory, dtype, math.prod(shape), PAGE + offset)
        return flat.reshape(shape)

    def _cells(self, offset: int) -> Cells:
        heads = offset + 8
        return Cells(
            self._array(offset, (1,), np.int64),
            self._array(heads, (CELLS, 3), np.int64),
            self._array(heads + CELLS * 3 * 8, (CELLS, CELL_BYTES), np.uint8),
        )


class Arena(SharedRegion):
    """`slots` x `slot_bytes` of expert bytes, each read in at most `pieces` pieces.

    `data` is uint8 [slots, slot_bytes]. `landed` int64 [slots, pieces]: the slot's generation for
    which a piece is complete, written by its reader after the piece's last byte.
    """

    KIND = 1
    GEOMETRY = ("slots", "slot_bytes", "pieces")
    slots: int
    slot_bytes: int
    pieces: int
    data: Bytes
    landed: Words

    def payload_bytes(self) -> int:
        return align_up(self.slots * self.slot_bytes, 8) + 8 * self.slots * self.pieces

    def _carve(self) -> None:
        self.data = self._array(0, (self.slots, self.slot_bytes), np.uint8)
        offset = align_up(self.slots * self.slot_bytes, 8)
        self.landed = self._array(offset, (self.slots, self.pieces), np.int64)


ABSENT = -1
# Order of `Directory.place`: where each tensor of an expert begins inside its slot.
PLACES = ("w1.weight", "w3.weight", "w2.weight", "w1.scale", "w3.scale", "w2.scale")


class Directory(SharedRegion):
    """Which slot holds an expert, and where its tensors begin in it. Written by the expert service.

    `entry` int64 [layers, experts]: ABSENT or `generation << 32 | slot`.
    `arriving` int64 [layers, experts]: the same of an expert that is being read, else ABSENT.
    `pieces` int64 [layers, experts]: how many pieces it is read in; fixed before the service says
    Ready.
    `place` int64 [layers, experts, 6]: byte offsets inside the slot in the order of PLACES; fixed
    before the service says Ready.
    `generation` int64 [slots]: grows each time the slot is given to another read, before the first
    byte is written; equal before and after a use means that the bytes did not change in between.
    """

    KIND = 2
    GEOMETRY = ("layers", "experts", "slots")
    layers: int
    experts: int
    slots: int
    entry: Words
    arriving: Words
    pieces: Words
    place: Words
    generation: Words

    def payload_bytes(self) -> int:
        return 8 * (self.layers * self.experts * (3 + len(PLACES)) + self.slots)

    def _carve(self) -> None:
        shape = self.layers, self.experts
        table = 8 * self.layers * self.experts
        self.entry = self._array(0, shape, np.int64)
        self.arriving = self._array(table, shape, np.int64)
        self.pieces = self._array(2 * table, shape, np.int64)
        self.place = self._array(3 * table, (*shape, len(PLACES)), np.int64)
        offset = table * (3 + len(PLACES))
        self.generation = self._array(offset, (self.slots,), np.int64)


def pack_entry(slot: int, generation: int) -> int:
    """A directory word for a resident expert."""
    return generation << 32 | slot


def entry_slot(word: int) -> int:
    """The slot of a directory word that is not ABSENT."""
    return word & 0xFFFFFFFF


def look_up(directory: Directory, arena: Arena, layer: int, experts: Sequence[int]) -> list[int]:
    """Directory words of `experts`, ABSENT where one is not in its slot.

    One whose readers have said of every piece that it is there counts as resident before the
    service has heard of it. What the words point to may be read after this call.
    """
    words: list[int] = directory.entry[layer].take(experts).tolist()
    if ABSENT in words:
        arriving = directory.arriving[layer].take(experts).tolist()
        for i, (expert, word) in enumerate(zip(experts, arriving, strict=True)):
            if words[i] == ABSENT != word and _complete(directory, arena, layer, expert, word):
                words[i] = word
    full_fence()
    return words


def _complete(directory: Directory, arena: Arena, layer: int, expert: int, word: int) -> bool:
    landed = arena.landed[entry_slot(word), : int(directory.pieces[layer, expert])]
    return bool((landed == word >> 32).all())


class Progress(SharedRegion):
    """How far compute has come. Written by compute; `words` int64 [COUNT].

    `epoch` grows whenever compute holds no slot: once it has passed the value the service noted
    after taking an expert out of the directory, no one reads that slot. Both sides order their
    store before their load with `full_fence`. `demand_done` is the last demand whose experts
    compute has used. `step` and `layer` say where it is; `heartbeat` is CLOCK_MONOTONIC in
    nanoseconds at the last change. `demands` are early copies of its demands.
    """

    KIND = 3
    GEOMETRY = ("words_count",)
    words_count: int
    words: Words
    demands: Cells
    EPOCH, DEMAND_DONE, STEP, LAYER, HEARTBEAT = range(5)
    COUNT = 8

    def payload_bytes(self) -> int:
        return 8 * self.words_count + _CELLS_BYTES

    def _carve(self) -> None:
        self.words = self._array(0, (self.words_count,), np.int64)
        self.demands = self._cells(8 * self.words_count)


class EarlyOrders(SharedRegion):
    """`of_reader` has early copies of each reader's orders. Written by the expert service."""

    KIND = 5
    GEOMETRY = ("readers",)
    readers: int
    of_reader: list[Cells]

    def payload_bytes(self) -> int:
        return self.readers * _CELLS_BYTES

    def _carve(self) -> None:
        self.of_reader = [self._cells(reader * _CELLS_BYTES) for reader in range(self.readers)]


class EngramRing(SharedRegion):
    """`blocks` blocks of rows, one a ticket in flight. Written by the engram service.

    `ready` int64 [blocks, layers]: ticket + 1 once that layer's rows of the ticket are complete.
    `codes` uint8 [blocks, layers, block_tokens, rows, head_dim] (e4m3 bytes) and `scales` uint8
    [blocks, layers, block_tokens, rows, head_dim / 32] (e8m0 bytes); a ticket of T tokens fills the
    first T of `block_tokens`.
    """

    KIND = 4
    GEOMETRY = ("blocks", "layers", "block_tokens", "rows", "head_dim")
    blocks: int
    layers: int
    block_tokens: int
    rows: int
    head_dim: int
    ready: Words
    codes: Bytes
    scales: Bytes

    def payload_bytes(self) -> int:
        rows = self.blocks * self.layers * self.block_tokens * self.rows
        return 8 * self.blocks * self.layers + rows * (self.head_dim + self.head_dim // 32)

    def _carve(self) -> None:
        shape = (self.blocks, self.layers, self.block_tokens, self.rows)
        self.ready = self._array(0, shape[:2], np.int64)
        offset = 8 * self.blocks * self.layers
        self.codes = self._array(offset, (*shape, self.head_dim), np.uint8)
        self.scales = self._array(
            offset + self.codes.nbytes, (*shape, self.head_dim // 32), np.uint8
        )
