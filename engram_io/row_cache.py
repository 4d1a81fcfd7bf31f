"""Rows read lately, kept within a budget of bytes.

Owns a set-associative table in numpy: a row's key names its set of `WAYS` places, and the place
used longest ago gives way. Every operation works on many rows at once, because a long prompt asks
for millions. Nothing here touches a file.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

WAYS = 8
EMPTY = -1
ABSENT = -1
# 2^64 divided by the golden ratio: spreads neighbouring keys over all sets.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
# One request may take over this share of the places, so that a prompt leaves room for what
# decoding keeps asking for.
_REQUEST_SHARE = 4


class RowCache:
    """Keeps up to `capacity` records of `record_bytes`; 0 where the budget is under one set."""

    def __init__(self, budget_bytes: int, record_bytes: int) -> None:
        per_place = record_bytes + 16  # a key and a clock beside every record
        self._sets = max(0, budget_bytes) // (per_place * WAYS)
        self.capacity = self._sets * WAYS
        self._keys = np.full((self._sets, WAYS), EMPTY, np.int64)
        self._used = np.zeros((self._sets, WAYS), np.int64)
        self._records = np.zeros((self.capacity, record_bytes), np.uint8)
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes the cache holds, used or not."""
        return self._keys.nbytes + self._used.nbytes + self._records.nbytes

    def find(self, keys: Int64) -> Int64:
        """The places of distinct non-negative `keys`, ABSENT where unknown; counts as a use."""
        if not self.capacity:
            return np.full(len(keys), ABSENT, np.int64)
        sets = self._set_of(keys)
        matches = self._keys[sets] == keys[:, None]
        places = np.where(matches.any(axis=1), sets * WAYS + matches.argmax(axis=1), ABSENT)
        self._clock += 1
        self._used.reshape(-1)[places[places != ABSENT]] = self._clock
        return places

    def records(self, places: Int64) -> Bytes:
        """Copies of the records at `places`, [P, record_bytes]."""
        return self._records[places]

    def insert(self, keys: Int64, records: Bytes, asked: Int64) -> None:
        """Keep `records` [P, record_bytes] of distinct `keys` that `find` did not know.

        `asked` [P] says how often each was asked for: where the request is too large for its share
        the most wanted stay.
        """
        if not self.capacity or not keys.size:
            return
        share = max(1, self.capacity // _REQUEST_SHARE)
        chosen = np.argsort(-asked, kind="stable")[:share]
        sets = self._set_of(keys[chosen])
        order = np.argsort(sets, kind="stable")
        chosen, sets = chosen[order], sets[order]
        # How many of this request go to the same set before this one: that many ways are taken.
        rank = np.arange(len(sets)) - np.searchsorted(sets, sets)
        fits = rank < WAYS
        chosen, sets, rank = chosen[fits], sets[fits], rank[fits]
        oldest_first = np.argsort(self._used[sets], axis=1, kind="stable")
        places = sets * WAYS + np.take_along_axis(oldest_first, rank[:, None], axis=1)[:, 0]
        self._keys.reshape(-1)[places] = keys[chosen]
        self._used.reshape(-1)[places] = self._clock
        self._records[places] = records[chosen]

    def _set_of(self, keys: Int64) -> Int64:
        mixed = (keys.astype(np.uint64) * _SPREAD) >> np.uint64(32)
        return (mixed % np.uint64(self._sets)).astype(np.int64)
