"""Engram rows inside one process, for tests and for measuring what the process group costs.

The same hash, cache and reads as the service, on the caller's thread. Has the shape of compute's
`EngramSource`, but gives numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engram_io.lookup import EngramLookup

Bytes = npt.NDArray[np.uint8]


class LocalEngramSource:
    """Reads a ticket's rows when they are asked for. Not for use from two threads at once."""

    def __init__(self, lookup: EngramLookup) -> None:
        self.lookup = lookup
        self._next_ticket = 0
        self._wanted: dict[int, npt.NDArray[np.int64]] = {}

    @classmethod
    def open(cls, directory: Path) -> LocalEngramSource:
        """Rows of the checkpoint in `directory`; raises CheckpointError."""
        return cls(EngramLookup.open(directory))

    def request(self, start: int, tokens: Sequence[int], history: Sequence[int]) -> int:
        """A ticket for the rows of `tokens` at positions `start`, `start` + 1, …

        `history` are the min(start, engram_max_ngram_size - 1) tokens before `start`, oldest first.
        Raises UsageError.
        """
        ticket = self._next_ticket
        self._wanted[ticket] = self.lookup.rows_of(start, tokens, history)
        self._next_ticket += 1
        return ticket

    def rows(self, ticket: int, engram_layer_index: int) -> tuple[Bytes, Bytes]:
        """Codes uint8 [T, rows_per_token, head_dim] (e4m3) and scales uint8
        [T, rows_per_token, head_dim / 32] (e8m0) of one engram layer. Raises ReadError, StallError.
        """
        wanted = self._wanted[ticket]
        table = self.lookup.tables[engram_layer_index]
        codes = np.empty((*wanted.shape, table.codes.shape[1]), np.uint8)
        scales = np.empty((*wanted.shape, table.scales.shape[1]), np.uint8)
        self.lookup.fill([engram_layer_index], wanted, codes, scales)
        return codes[engram_layer_index], scales[engram_layer_index]

    def done(self, ticket: int) -> None:
        """Forget the ticket."""
        self._wanted.pop(ticket, None)
