"""What compute has demanded and not yet used, and what therefore must not be evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from expert_io.policy import Key


class OpenDemands:
    """Owns the open demands. `protected` counts by key the demands and pins that name it."""

    def __init__(self) -> None:
        self.protected: dict[Key, int] = {}
        self._open: dict[int, list[Key]] = {}

    def open(self, demand: int, keys: Sequence[Key]) -> None:
        """`demand` names `keys`; the same demand again changes nothing."""
        if demand not in self._open:
            self._open[demand] = list(keys)
            for key in keys:
                self.pin(key)

    def pin(self, key: Key) -> None:
        """Protect `key` once more."""
        self.protected[key] = self.protected.get(key, 0) + 1

    def close(self, until: int) -> Iterator[tuple[int, Key]]:
        """Compute is done with every demand up to `until`: (demand, key) of each that was open."""
        for demand in [number for number in self._open if number <= until]:
            for key in self._open.pop(demand):
                self.protected[key] -= 1
                if not self.protected[key]:
                    del self.protected[key]
                yield demand, key
