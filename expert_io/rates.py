"""How often experts are used, and eviction by it.

A key's rate is kept while it is not resident too: what returns is judged by all its uses, not by
those since it came. Two memories of different length are summed, so that a burst counts at once
and a habit is not forgotten over one: uses come in topics that last longer than any recency list.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt

from expert_io.policy import Key

Rows = npt.NDArray[np.int64]


class UseRates:
    """Aged counts of uses of every key there ever was, each with a row of its own from 0 up.

    A use weighs half as much one half-life later. Half-lives are multiples of how many uses there
    are, on the mean, from one use of a key to its next: as many as there are keys.
    """

    HALF_LIVES = (1.0, 8.0)
    FEWEST_KEYS = 16
    LARGEST = 1e100

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self._rows: dict[Key, int] = {}
        self._counts = np.zeros((len(self.HALF_LIVES), 64))
        # Instead of shrinking all counts as time passes, newer uses weigh more.
        self._weights = [1.0] * len(self.HALF_LIVES)

    @property
    def room(self) -> int:
        """As many rows as arrays beside this one should have."""
        return self._counts.shape[1]

    def row(self, key: Key) -> int:
        """The row of `key`, a new one if need be."""
        row = self._rows.setdefault(key, len(self.keys))
        if row == len(self.keys):
            self.keys.append(key)
            if row == self.room:
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        return row

    def used(self, key: Key) -> None:
        """Count a use."""
        row = self.row(key)
        mean_uses_between = max(self.FEWEST_KEYS, len(self.keys))
        for memory, half_life in enumerate(self.HALF_LIVES):
            weight = self._weights[memory]
            self._counts[memory, row] += weight / half_life
            if weight > self.LARGEST:
                self._counts[memory] /= weight
                weight = 1.0
            self._weights[memory] = weight * 2 ** (1 / (half_life * mean_uses_between))

    def of(self, rows: Rows) -> npt.NDArray[np.float64]:
        """Rates of `rows`, to be compared with each other only."""
        shares: npt.NDArray[np.float64] = 1 / np.array(self._weights)
        rates: npt.NDArray[np.float64] = shares @ self._counts[:, rows]
        return rates


class LeastExpected:
    """Gives up the key with the lowest rate; `rates` are counted by the owner.

    A few per cent of the lowest are picked out at once and stay candidates until they are used, so
    that a victim costs microseconds however large the cache.
    """

    CANDIDATES, MOST_CANDIDATES = 1 / 64, 64

    def __init__(self, rates: UseRates) -> None:
        self._rates = rates
        self._resident = np.zeros(rates.room, np.bool_)
        self._count = 0
        self._lowest: dict[Key, None] = {}

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Key) -> bool:
        row = self._rates.row(key)
        return row < len(self._resident) and bool(self._resident[row])

    def inserted(self, key: Key) -> None:
        if key not in self:
            missing = self._rates.room - len(self._resident)
            if missing:
                more = np.zeros(missing, np.bool_)
                self._resident = np.concatenate([self._resident, more])
            self._resident[self._rates.row(key)] = True
            self._count += 1

    def used(self, key: Key) -> None:
        self._lowest.pop(key, None)

    def removed(self, key: Key) -> None:
        if key in self:
            self._resident[self._rates.row(key)] = False
            self._count -= 1
        self._lowest.pop(key, None)

    def victim(self, protected: Container[Key]) -> Key | None:
        found = next((key for key in self._lowest if key not in protected), None)
        if found is None:
            share = int(self._count * self.CANDIDATES)
            self._lowest = dict.fromkeys(self._rising(min(self.MOST_CANDIDATES, share + 1)))
            found = next((key for key in self._lowest if key not in protected), None)
        if found is None:
            found = next((key for key in self._rising(self._count) if key not in protected), None)
        return found

    def _rising(self, most: int) -> Sequence[Key]:
        """The `most` keys of the lowest rates, lowest first."""
        rows = np.flatnonzero(self._resident)
        rates = self._rates.of(rows)
        if most < len(rows):
            chosen = np.argpartition(rates, most)[:most]
            rows, rates = rows[chosen], rates[chosen]
        return [self._rates.keys[row] for row in rows[np.argsort(rates, kind="stable")]]


class NewcomersFirst(LeastExpected):
    """Gives up what came last and was not used since, and only then what is used least.

    Where slightly more is used in turn than fits, all are used alike and whatever goes is wanted
    back; so the fewer go the better, and a newcomer's slot serves all that do not fit.
    """

    def __init__(self, rates: UseRates) -> None:
        super().__init__(rates)
        self._new: dict[Key, None] = {}

    def inserted(self, key: Key) -> None:
        super().inserted(key)
        self._new[key] = None

    def used(self, key: Key) -> None:
        super().used(key)
        self._new.pop(key, None)

    def removed(self, key: Key) -> None:
        super().removed(key)
        self._new.pop(key, None)

    def victim(self, protected: Container[Key]) -> Key | None:
        found = next((key for key in reversed(self._new) if key not in protected), None)
        return super().victim(protected) if found is None else found
