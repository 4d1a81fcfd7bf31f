"""From token ids to the bytes of their engram rows: hash, cache and reader put together.

Owns one checkpoint's engram side without any process around it; the service and the in-process
source are both thin users of it. A row asked for many times in one request is read and looked up
once. Not for use from two threads at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engram_io.block_reader import BlockReader
from engram_io.hashing import NgramHash
from engram_io.reader import BatchListener, ReadBlocks, RowReader, WantedRows
from engram_io.row_cache import ABSENT, RowCache
from engram_io.rows import locate_tables
from engram_io.token_map import TokenMap
from protocol import counters
from protocol.config import ModelConfig
from protocol.errors import UsageError
from protocol.shards import Shards

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

DEFAULT_CACHE_BYTES = 256 << 20
# Where the disk gives most random reads a second: 90,000 at 128, 69,000 at 64, 45,000 at 32.
DEFAULT_DEPTH = 128


def _ignore(layers: Sequence[int], count: int, nbytes: int, begin_ns: int, end_ns: int) -> None:
    """A listener for those who want none."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The `distinct` rows [P] of one engram layer that a request names, their cache `keys`, how
    often each is `asked` for, and their `records`, whole but for the `missing` ones.
    `inverse` [T * R] is the place in `distinct` of every row named."""

    index: int
    distinct: Int64
    keys: Int64
    inverse: Int64
    asked: Int64
    missing: Int64
    records: Bytes


class EngramLookup:
    """Rows of a checkpoint by token ids.

    `hash`, `tables`, `token_map` and `blocks` are there to be shown and asked; `counts` are the
    figures so far in the words of `protocol.counters`.
    """

    def __init__(
        self,
        config: ModelConfig,
        shards: Shards,
        token_map: TokenMap,
        *,
        depth: int = DEFAULT_DEPTH,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        direct: bool = True,
        on_batch: BatchListener = _ignore,
        wrap_reads: Callable[[ReadBlocks], ReadBlocks] = lambda read: read,
    ) -> None:
        """`wrap_reads` may put a layer around the disk that breaks it on purpose.

        Raises CheckpointError where config and tables do not fit each other.
        """
        self.token_map = token_map
        self.hash = NgramHash.from_config(
            config, token_map.classes, shards.directory / "config.json"
        )
        self.tables = locate_tables(shards, config)
        self._head_dim = config.engram_head_dim
        paths = [part.path for table in self.tables for part in (table.codes, table.scales)]
        self.blocks = BlockReader(paths, depth, direct=direct)
        self._reader = RowReader(self.blocks, self._count_batch, wrap_reads(self.blocks.read))
        self._on_batch = on_batch
        self._record_bytes = self._head_dim + self._head_dim // 32
        self.cache = RowCache(cache_bytes, self._record_bytes)
        # One number space for the rows of all tables.
        self._first_key = np.cumsum([0, *(table.rows for table in self.tables)])
        self.counts: dict[str, float] = dict.fromkeys(
            (
                counters.ENGRAM_ROWS,
                counters.ENGRAM_ROWS_READ,
                counters.ENGRAM_CACHE_HITS,
                counters.ENGRAM_READ_BYTES,
                counters.ENGRAM_READ_SECONDS,
            ),
            0,
        )

    @classmethod
    def open(cls, directory: Path, *, direct: bool = True) -> EngramLookup:
        """The lookup of the checkpoint in `directory` with the usual settings."""
        config = ModelConfig.load(directory)
        shards = Shards.open(directory, config)
        return cls(config, shards, TokenMap.load(directory, config), direct=direct)

    def rows_of(self, start: int, tokens: Sequence[int], history: Sequence[int]) -> Int64:
        """Which rows `tokens` at positions `start`, … need, [N, T, rows_per_token].

        Raises UsageError where `history` is not what lies between the n-grams' reach and `start`,
        or a token is outside the vocabulary.
        """
        expected = min(start, self.hash.reach)
        if start < 0 or len(history) != expected:
            raise UsageError(
                f"engram rows from position {start}: {len(history)} tokens of history, "
                f"expected {max(expected, 0)}"
            )
        try:
            return self.hash.rows(tokens, history)
        except IndexError as error:
            raise UsageError(f"engram rows: {error}") from None

    def fill(self, indices: Sequence[int], rows: Int64, codes: Bytes, scales: Bytes) -> None:
        """Bring the rows of the engram layers with numbers `indices`, read all at once, to `codes`
        [N, T, R, head_dim] (e4m3) and `scales` [N, T, R, head_dim / 32] (e8m0).

        `rows` [N, T, R] are of all layers, as `rows_of` gives them; of the others nothing is
        touched. Raises ReadError or StallError; what was read before is still kept.
        """
        found = [self._look_up(index, rows[index]) for index in indices]
        self._read(found)
        for of in found:
            self.cache.insert(of.keys[of.missing], of.records[of.missing], of.asked[of.missing])
            records = of.records[of.inverse]
            codes[of.index] = records[:, : self._head_dim].reshape(codes[of.index].shape)
            scales[of.index] = records[:, self._head_dim :].reshape(scales[of.index].shape)
            asked, missing = int(of.asked.sum()), of.asked[of.missing]
            self.counts[counters.ENGRAM_ROWS] += asked
            self.counts[counters.ENGRAM_ROWS_READ] += len(missing)
            self.counts[counters.ENGRAM_CACHE_HITS] += asked - int(missing.sum())

    def close(self) -> None:
        """Close the shards."""
        self.blocks.close()

    def _look_up(self, index: int, rows: Int64) -> _Found:
        """What the cache has of `rows` [T, R] of engram layer number `index`."""
        distinct, inverse, asked = np.unique(rows.ravel(), return_inverse=True, return_counts=True)
        keys = distinct + self._first_key[index]
        places = self.cache.find(keys)
        missing = np.flatnonzero(places == ABSENT)
        records = np.empty((len(distinct), self._record_bytes), np.uint8)
        if len(missing) < len(distinct):
            known = places != ABSENT
            records[known] = self.cache.records(places[known])
        return _Found(index, distinct, keys, inverse, asked, missing, records)

    def _read(self, found: Sequence[_Found]) -> None:
        """Bring what is missing of `found` into its records."""
        fresh = [np.empty((len(of.missing), self._record_bytes), np.uint8) for of in found]
        wanted = [
            WantedRows(
                self.tables[of.index],
                of.distinct[of.missing],
                into[:, : self._head_dim],
                into[:, self._head_dim :],
            )
            for of, into in zip(found, fresh, strict=True)
        ]
        begin = time.perf_counter()
        try:
            self._reader.read(wanted)
        finally:
            self.counts[counters.ENGRAM_READ_SECONDS] += time.perf_counter() - begin
        for of, into in zip(found, fresh, strict=True):
            of.records[of.missing] = into

    def _count_batch(
        self, layers: Sequence[int], count: int, nbytes: int, begin_ns: int, end_ns: int
    ) -> None:
        self.counts[counters.ENGRAM_READ_BYTES] += nbytes
        self._on_batch(layers, count, nbytes, begin_ns, end_ns)
