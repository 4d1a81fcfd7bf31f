"""Short measurements of what the engine lives on: its disk as it reads it, and memory.

Each takes about a second. Reads are whole experts at random places with O_DIRECT, as the readers
make them, and single blocks, as engram rows are read.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from expert_io.disk import takes_direct
from protocol.huge_pages import private_memory

BLOCK = 4096
SECONDS = 1.0
READERS = (1, 2, 4, 8)
ROW_READS = 64
# A reader count is enough once twice as many gain less than this.
GAIN = 1.08
MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes a second by number of readers; single-block reads a second; how often a file's bytes
    came from the page cache when read again without O_DIRECT, as bytes a second (0: not tried)."""

    direct: bool
    by_readers: dict[int, float]
    rows_per_s: float
    cached: float

    @property
    def best_readers(self) -> int:
        """The fewest that are about as fast as any more."""
        counts = sorted(self.by_readers)
        best = counts[0]
        for count in counts[1:]:
            if self.by_readers[count] >= GAIN * self.by_readers[best]:
                best = count
        return best

    @property
    def bandwidth(self) -> float:
        """Bytes a second with that many."""
        return self.by_readers[self.best_readers]


def measure_disk(files: Sequence[Path], read_bytes: int, seconds: float = SECONDS) -> DiskSpeed:
    """Read `read_bytes` at a time from random places of `files`."""
    large = [path for path in files if path.stat().st_size >= BLOCK]
    direct = takes_direct(str(large[0]))
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    descriptors = [(os.open(path, flags), path.stat().st_size) for path in large]
    length = -(-read_bytes // BLOCK) * BLOCK
    try:
        by_readers = {
            count: length * _rate(count, descriptors, length, seconds) for count in READERS
        }
        rows = _rate(ROW_READS, descriptors, BLOCK, seconds)
    finally:
        for descriptor, _ in descriptors:
            os.close(descriptor)
    return DiskSpeed(direct, by_readers, rows, _cached(large[0], length))


def _rate(
    threads: int, descriptors: Sequence[tuple[int, int]], length: int, seconds: float
) -> float:
    """Reads a second by `threads` at once; preadv does not hold Python's lock."""
    deadline = time.perf_counter() + seconds

    def loop(seed: int) -> float:
        draw = random.Random(seed)
        # As the arena has it.
        memory = private_memory(length)
        reads = 0.0
        # At least one, however busy the machine or slow the disk: a rate is divided by.
        while not reads or time.perf_counter() < deadline:
            descriptor, size = draw.choice(descriptors)
            offset = draw.randrange(max(1, (size - length) // BLOCK)) * BLOCK
            # A file shorter than a whole read counts for what it gave.
            reads += os.preadv(descriptor, [memory], offset) / length
        return reads

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(loop, range(threads)))
    return total / (time.perf_counter() - begin)


def _cached(path: Path, length: int) -> float:
    """Bytes a second of a second buffered read of the same bytes."""
    memory = mmap.mmap(-1, length)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [memory], 0)
        begin = time.perf_counter()
        count = os.preadv(descriptor, [memory], 0)
        return count / max(time.perf_counter() - begin, 1e-9)
    finally:
        os.posix_fadvise(descriptor, 0, length, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class MemorySpeed:
    """Bytes a second read from the memory that compute uses, and from this machine's memory to the
    GPU (0 without one)."""

    rate: float
    link: float


def measure_memory(device: str) -> MemorySpeed:
    """Time copies inside the memory of `device`, which read and write, and copies to it."""
    # Seconds to load, which no other command should wait for.
    import torch

    source = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device == "cpu":
        return MemorySpeed(_best_of(lambda: target.copy_(source), 2 * MEMORY_BYTES), 0.0)
    pinned = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, pin_memory=True)

    def copied(origin: torch.Tensor) -> None:
        target.copy_(origin)
        torch.cuda.synchronize()

    return MemorySpeed(
        _best_of(lambda: copied(source), 2 * MEMORY_BYTES),
        _best_of(lambda: copied(pinned), MEMORY_BYTES),
    )


def _best_of(work: Callable[[], object], size: int) -> float:
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return size / best
