"""Many aligned reads at once into one staging buffer, by the fastest way the file system takes.

Owns the open shard files, the staging memory and the two ways to read: O_DIRECT through kernel AIO,
and preadv in a thread pool where one of those is refused. Never mmap: a fault on a mapped table
reads around the row and stops the whole process when the disk fails. Promises that a buffered
read's pages do not stay in the page cache, and that no wait is longer than `stall_s` without a read
that finished. Not for use from two threads at once.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engram_io.kernel_aio import AioQueue, read_blocks
from engram_io.rows import ALIGNMENT, MERGE_SPAN
from protocol.errors import CheckpointError, StallError

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

STAGING_BYTES = 16 << 20
STALL_S = 20.0
# Result of a read that has not come back; no errno is this large.
PENDING = -(1 << 40)
# More threads lose to the interpreter lock what they win at the disk.
MAX_THREADS = 16


class _Engine(Protocol):
    """One way to carry out reads. `drain` waits for what a stalled `run` left in flight."""

    def run(self, fd: Int64, offset: Int64, length: Int64, at: Int64) -> Int64: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


class BlockReader:
    """Reads blocks of `paths` into `staging`, at most `depth` at once.

    `way` says in words how it reads.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        depth: int,
        *,
        direct: bool = True,
        stall_s: float = STALL_S,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Raises CheckpointError where a file cannot be opened."""
        if staging_bytes < 2 * MERGE_SPAN:
            raise ValueError(f"{staging_bytes} bytes of staging do not hold one merged read")
        self._memory = mmap.mmap(-1, staging_bytes)
        self.staging: Bytes = np.frombuffer(self._memory, np.uint8)
        self._numbers = {path: number for number, path in enumerate(dict.fromkeys(paths))}
        refusal = "" if direct else "not asked for"
        descriptors = None if refusal else self._open_direct()
        self._buffered = descriptors is None
        if descriptors is None:
            refusal = refusal or "the file system refuses it"
            descriptors = [_open(path, 0) for path in self._numbers]
            for fd in descriptors:
                # Otherwise every row would drag in its neighbourhood.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._fds = np.array(descriptors, np.int64)
        self._engine: _Engine
        self._engine, self.way = self._choose_engine(depth, stall_s, refusal)

    def number(self, path: Path) -> int:
        """The number of `path` in `read`'s `file`."""
        return self._numbers[path]

    def read(self, file: Int64, offset: Int64, length: Int64, at: Int64) -> Int64:
        """Carry out M reads: `length[m]` bytes at `offset[m]` to `staging[at[m]:]`, all aligned.

        Returns bytes read or -errno, [M]. Raises StallError where the disk stopped answering; the
        reads in flight then still own the staging memory, and the next call waits for them first.
        """
        self._engine.drain()
        results = self._engine.run(self._fds[file], offset, length, at)
        if self._buffered:
            self._drop_pages(file)
        return results

    def close(self) -> None:
        """Close the files. The staging memory goes when its last view does."""
        self._engine.close()
        for fd in self._fds.tolist():
            os.close(fd)

    def _drop_pages(self, file: Int64) -> None:
        # Whole files: one call for thousands of reads, and nobody else reads these pages.
        for fd in self._fds[np.unique(file)].tolist():
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _open_direct(self) -> list[int] | None:
        """Descriptors that take O_DIRECT, tried with one read each; None where one does not."""
        descriptors: list[int] = []
        probe = memoryview(self._memory)[:ALIGNMENT]
        try:
            for path in self._numbers:
                descriptors.append(_open(path, os.O_DIRECT))
                os.preadv(descriptors[-1], [probe], 0)
        except OSError as error:
            for fd in descriptors:
                os.close(fd)
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            path = list(self._numbers)[max(0, len(descriptors) - 1)]
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        return descriptors

    def _choose_engine(self, depth: int, stall_s: float, refusal: str) -> tuple[_Engine, str]:
        if not self._buffered:
            try:
                queue = AioQueue(depth)
            except OSError as error:
                way = f"O_DIRECT preadv, kernel AIO refused ({error.strerror})"
            else:
                base = self.staging.ctypes.data
                return _AioEngine(queue, base, stall_s), f"O_DIRECT, kernel AIO, {depth} at once"
        else:
            way = f"buffered preadv, O_DIRECT {refusal}"
        threads = min(depth, MAX_THREADS)
        return _ThreadEngine(
            threads, memoryview(self._memory), stall_s
        ), f"{way}, {threads} threads"


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            raise
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from None


class _AioEngine:
    def __init__(self, queue: AioQueue, base: int, stall_s: float) -> None:
        self._queue = queue
        self._base = base
        self._stall_s = stall_s
        self._in_flight = 0

    def run(self, fd: Int64, offset: Int64, length: Int64, at: Int64) -> Int64:
        results = np.full(len(fd), PENDING, np.int64)
        # `blocks` is not used again, but has to live until the kernel has copied it.
        blocks, pointers = read_blocks(fd, offset, length, self._base + at)
        submitted = 0
        while submitted < len(blocks) or self._in_flight:
            room = min(self._queue.depth - self._in_flight, len(blocks) - submitted)
            if room:
                try:
                    taken = self._queue.submit(pointers[submitted : submitted + room])
                except OSError as error:
                    results[submitted] = -(error.errno or errno.EIO)
                    submitted += 1
                    continue
                submitted += taken
                self._in_flight += taken
            tags, outcome = self._collect()
            results[tags] = outcome
        return results

    def drain(self) -> None:
        while self._in_flight:
            self._collect()

    def close(self) -> None:
        # Closing a context waits without a bound; the process's end frees one whose disk is stuck.
        if not self._in_flight:
            self._queue.close()

    def _collect(self) -> tuple[Int64, Int64]:
        # A quarter at a time keeps the disk's queue filled without waking for every read.
        least = max(1, min(self._in_flight, self._queue.depth // 4))
        tags, outcome = self._queue.collect(least, self._stall_s)
        if not len(tags):
            raise _stalled(self._in_flight, self._stall_s)
        self._in_flight -= len(tags)
        return tags, outcome


class _ThreadEngine:
    def __init__(self, threads: int, memory: memoryview, stall_s: float) -> None:
        self._pool = ThreadPoolExecutor(threads, "engram-read")
        self._threads = threads
        self._memory = memory
        self._stall_s = stall_s
        self._running: list[Future[None]] = []

    def run(self, fd: Int64, offset: Int64, length: Int64, at: Int64) -> Int64:
        results = np.full(len(fd), PENDING, np.int64)
        reads = list(zip(fd.tolist(), offset.tolist(), length.tolist(), at.tolist(), strict=True))
        self._running = [
            self._pool.submit(self._read_every, reads, results, first)
            for first in range(min(self._threads, len(reads)))
        ]
        finished, moved = 0, time.monotonic()
        while wait(self._running, timeout=min(1.0, self._stall_s)).not_done:
            now_finished = int((results != PENDING).sum())
            if now_finished > finished:
                finished, moved = now_finished, time.monotonic()
            elif time.monotonic() - moved >= self._stall_s:
                raise _stalled(len(reads) - finished, self._stall_s)
        return results

    def drain(self) -> None:
        stuck = wait(self._running, timeout=self._stall_s).not_done
        if stuck:
            raise _stalled(len(stuck), self._stall_s)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_every(
        self, reads: list[tuple[int, int, int, int]], results: Int64, first: int
    ) -> None:
        """Reads `first`, `first + threads`, …: so neighbours in the file are read side by side."""
        for index in range(first, len(reads), self._threads):
            fd, offset, length, at = reads[index]
            try:
                results[index] = os.preadv(fd, [self._memory[at : at + length]], offset)
            except OSError as error:
                results[index] = -(error.errno or errno.EIO)


def _stalled(count: int, seconds: float) -> StallError:
    return StallError(
        f"engram rows: {count} reads without an answer from the disk for {seconds:g} s; "
        "look at the disk's health and at the kernel log"
    )
