"""Reads chosen rows of engram tables, in file order, neighbours together, many at once.

Owns what happens to a read that fails: it is tried again a few times, and then fails the request
with the file, the tensor and the offset. The reader itself lives on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engram_io.block_reader import BlockReader
from engram_io.rows import EngramTable, ReadPlan, plan_rows
from protocol.errors import ReadError
from protocol.shards import TensorEntry

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

ATTEMPTS = 3
RETRY_PAUSE_S = 0.02
NAN_SCALE = 255

# (file, offset, length, staging offset) of M reads -> bytes read or -errno, as BlockReader.read.
ReadBlocks = Callable[[Int64, Int64, Int64, Int64], Int64]


# Hears of every round of reads: the layers they are for, how many they are, bytes read, monotonic
# begin and end in nanoseconds.
BatchListener = Callable[[Sequence[int], int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Distinct, ascending `rows` [R] of `table`, to be read to `codes` [R, head_dim] and `scales`
    [R, head_dim / 32]."""

    table: EngramTable
    rows: Int64
    codes: Bytes
    scales: Bytes


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor's share of a batch: its reads are numbers `first` and up of the batch."""

    tensor: TensorEntry
    plan: ReadPlan
    out: Bytes
    first: int


class RowReader:
    """Fetches rows from disk. Not for use from two threads at once."""

    def __init__(
        self,
        blocks: BlockReader,
        on_batch: BatchListener,
        read_blocks: ReadBlocks | None = None,
    ) -> None:
        """`read_blocks` takes the place of `blocks.read` where faults are to be provoked."""
        self._blocks = blocks
        self._read_blocks = read_blocks or blocks.read
        self._on_batch = on_batch
        # The staging memory as windows of so many bytes, one at every byte.
        self._windows: dict[int, Bytes] = {}

    def read(self, wanted: Sequence[WantedRows]) -> None:
        """Read all that is `wanted`, of one table or of several.

        Raises ReadError or StallError; `codes` and `scales` then hold no whole answer.
        """
        wanted = [want for want in wanted if want.rows.size]
        if not wanted:
            return
        parts: list[_Part] = []
        first = 0
        for want in wanted:
            want.table.check(want.rows)
            for tensor, out in ((want.table.codes, want.codes), (want.table.scales, want.scales)):
                plan = plan_rows(tensor, want.rows)
                parts.append(_Part(tensor, plan, out, first))
                first += len(plan.offset)
        # One batch for all, so that a token's few reads wait at the disk together.
        batch = _Batch(parts, [self._blocks.number(part.tensor.path) for part in parts])
        for begin, end in batch.rounds(len(self._blocks.staging)):
            self._read_round(batch, begin, end, [want.table.layer for want in wanted])
        for want in wanted:
            _refuse_nan_scales(want)

    def _read_round(self, batch: _Batch, begin: int, end: int, layers: Sequence[int]) -> None:
        """Read number `begin` to `end` - 1 of the batch, and take their rows out of the staging."""
        length = batch.length[begin:end]
        at = np.cumsum(length) - length
        begin_ns = time.monotonic_ns()
        read = self._settle(batch, np.arange(begin, end), at)
        self._on_batch(layers, end - begin, read, begin_ns, time.monotonic_ns())
        for part in batch.parts:
            low, high = np.searchsorted(part.plan.read + part.first, (begin, end))
            source = part.plan.read[low:high] + part.first - begin
            places = at[source] + part.plan.at[low:high]
            part.out[low:high] = self._windows_of(part.plan.width)[places]

    def _windows_of(self, width: int) -> Bytes:
        if width not in self._windows:
            view = np.lib.stride_tricks.sliding_window_view(self._blocks.staging, width)
            self._windows[width] = view
        return self._windows[width]

    def _settle(self, batch: _Batch, reads: Int64, at: Int64) -> int:
        """Carry out `reads` of the batch, the failed ones again; returns the bytes read."""
        total = 0
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(RETRY_PAUSE_S)
            results = self._read_blocks(
                batch.file[reads], batch.offset[reads], batch.length[reads], at
            )
            total += int(results[results > 0].sum())
            failed = results < batch.needed[reads]
            if not failed.any():
                return total
            reads, at, results = reads[failed], at[failed], results[failed]
        raise batch.failure(int(reads[0]), int(results[0]), len(reads))


class _Batch:
    """All reads of one call, as arrays [M]."""

    def __init__(self, parts: Sequence[_Part], files: Sequence[int]) -> None:
        self.parts = parts
        plans = [part.plan for part in parts]
        self.file = np.repeat(np.array(files, np.int64), [len(plan.offset) for plan in plans])
        self.offset = np.concatenate([plan.offset for plan in plans])
        self.length = np.concatenate([plan.length for plan in plans])
        self.needed = np.concatenate([plan.needed for plan in plans])

    def rounds(self, staging_bytes: int) -> Iterator[tuple[int, int]]:
        """Cut the batch into ranges of reads that fit the staging memory."""
        ends = np.cumsum(self.length)
        begin = 0
        while begin < len(ends):
            done = ends[begin - 1] if begin else 0
            end = int(np.searchsorted(ends, done + staging_bytes, "right"))
            yield begin, end
            begin = end

    def failure(self, read: int, result: int, count: int) -> ReadError:
        """The one line for read number `read`, which gave `result` at its last attempt."""
        part = [part for part in self.parts if part.first <= read][-1]
        if result < 0:
            what = os.strerror(-result)
        else:
            what = f"{result} bytes came, {self.needed[read]} were needed; the file was cut short"
        others = f" (and {count - 1} more reads)" if count > 1 else ""
        return ReadError(
            f"{part.tensor.path}: {part.tensor.name}: read of {self.length[read]} bytes at offset "
            f"{self.offset[read]} failed {ATTEMPTS} times: {what}{others}"
        )


def _refuse_nan_scales(want: WantedRows) -> None:
    if not np.any(want.scales == NAN_SCALE):
        return
    row = int(want.rows[(want.scales == NAN_SCALE).any(axis=1)][0])
    scales = want.table.scales
    offset = scales.offset + row * scales.shape[1]
    raise ReadError(
        f"{scales.path}: {scales.name}: row {row} at offset {offset} has a scale that is not a "
        "number; fetch the file again"
    )
