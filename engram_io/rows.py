"""Where an engram row lies on disk, and which reads fetch many of them.

Owns the geometry of a layer's table (e4m3 rows and their e8m0 scales, two tensors) and the merging
of rows into aligned reads. Pure arithmetic over numpy arrays; it opens no file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.config import ModelConfig
from protocol.errors import ReadError
from protocol.shards import Shards, TensorEntry

Int64 = npt.NDArray[np.int64]

# What O_DIRECT asks of offsets and lengths on every disk in use, and the page of a buffered read.
ALIGNMENT = 4096
# Reading over a gap costs less than another read as long as the gap is shorter than what the disk
# streams in the time of one random read: 1.3 GiB/s / 60,000 reads/s = 23 KB.
MERGE_GAP = 16 << 10
# Bounds one read, so that a dense run of rows is still read by many at once.
MERGE_SPAN = 128 << 10


@dataclass(frozen=True, slots=True)
class EngramTable:
    """The rows of engram layer `layer`.

    `codes` is e4m3 [rows, head_dim], `scales` e8m0 [rows, head_dim / 32].
    """

    layer: int
    codes: TensorEntry
    scales: TensorEntry

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    def check(self, rows: Int64) -> None:
        """Raises ReadError where one of the ascending `rows` is not in the table."""
        if rows.size and (rows[0] < 0 or rows[-1] >= self.rows):
            outside = rows[0] if rows[0] < 0 else rows[-1]
            raise ReadError(
                f"{self.codes.path}: {self.codes.name} has {self.rows} rows, row {outside} was "
                "asked for; config.json and shards are not of one revision"
            )


def locate_tables(shards: Shards, config: ModelConfig) -> list[EngramTable]:
    """The table of every engram layer, in layer order."""
    return [
        EngramTable(
            layer,
            shards.tensors[f"layers.{layer}.engram.embed.weight"],
            shards.tensors[f"layers.{layer}.engram.embed.scale"],
        )
        for layer in config.engram_layer_ids
    ]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """M aligned reads of one file that cover P pieces of `width` bytes each.

    Read m takes `length[m]` bytes at `offset[m]`, of which at least `needed[m]` have to come (a
    file may end inside its last block). Piece p is found `at[p]` bytes into read `read[p]`; `read`
    is ascending.
    """

    width: int
    offset: Int64
    length: Int64
    needed: Int64
    read: Int64
    at: Int64


def plan_reads(begin: Int64, width: int, gap: int = MERGE_GAP, span: int = MERGE_SPAN) -> ReadPlan:
    """Reads for the pieces of `width` bytes at the ascending offsets `begin` [P].

    Neighbours up to `gap` bytes apart share a read, unless they lie in different multiples of
    `span`; so no read is longer than `span` plus one piece and its alignment.
    """
    low = begin - begin % ALIGNMENT
    end = begin + width
    high = end + -end % ALIGNMENT
    starts = np.ones(len(begin), bool)
    starts[1:] = (low[1:] > high[:-1] + gap) | (low[1:] // span != low[:-1] // span)
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(begin))[: len(first)] - 1
    read = np.cumsum(starts) - 1
    offset = low[first]
    return ReadPlan(
        width=width,
        offset=offset,
        length=high[last] - offset,
        needed=end[last] - offset,
        read=read,
        at=begin - offset[read],
    )


def plan_rows(tensor: TensorEntry, rows: Int64) -> ReadPlan:
    """Reads for the ascending `rows` of a table's tensor with one byte an element."""
    width = tensor.shape[1]
    return plan_reads(tensor.offset + rows * width, width)
