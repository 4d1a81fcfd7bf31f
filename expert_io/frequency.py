"""Eviction policies that count uses: least frequently used with ageing, and quotas for layers."""

from __future__ import annotations

import heapq
from collections.abc import Container

from expert_io.policy import Key, LeastRecentlyUsed


class LeastFrequentlyUsed:
    """Gives up the key with the smallest aged count of uses.

    A use weighs twice as much as one `HALF_LIFE` x (resident keys) uses before it. Instead of
    shrinking all counts as time passes, newer uses weigh more, so that only what is used changes.
    """

    HALF_LIFE = 8

    def __init__(self, seed: int = 0) -> None:
        self._weight: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []  # stale entries are skipped when they come up
        self._newest: dict[Key, int] = {}
        self._entries = 0
        self._use = 1.0

    def inserted(self, key: Key) -> None:
        self._weight[key] = 0.0
        self._count(key)

    def used(self, key: Key) -> None:
        if key in self._weight:
            self._count(key)

    def removed(self, key: Key) -> None:
        self._weight.pop(key, None)
        self._newest.pop(key, None)

    def victim(self, protected: Container[Key]) -> Key | None:
        kept, found = [], None
        while self._heap and found is None:
            entry = self._heap[0]
            if self._newest.get(entry[2]) == entry[1] and entry[2] not in protected:
                found = entry[2]
                break
            heapq.heappop(self._heap)
            if self._newest.get(entry[2]) == entry[1]:
                kept.append(entry)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return found

    def _count(self, key: Key) -> None:
        self._weight[key] += self._use
        self._push(key)
        self._use *= 2 ** (1 / (self.HALF_LIFE * max(16, len(self._weight))))
        if self._use > 1e100 or len(self._heap) > 4 * len(self._weight) + 64:
            self._rebuild()

    def _push(self, key: Key) -> None:
        self._entries += 1
        self._newest[key] = self._entries
        heapq.heappush(self._heap, (self._weight[key], self._entries, key))

    def _rebuild(self) -> None:
        """Drop stale entries, and scale the weights down so that none overflows."""
        self._weight = {key: weight / self._use for key, weight in self._weight.items()}
        self._use = 1.0
        self._heap.clear()
        # In the order of their last uses, which decides between equal weights.
        for key in sorted(self._weight, key=self._newest.__getitem__):
            self._push(key)


class LayerQuotas:
    """Gives up the least recently used key of the layer that holds most.

    Every layer ends with an equal share: one whose routing spreads over many experts cannot push
    out those of the others.
    """

    def __init__(self, seed: int = 0) -> None:
        self._layers: dict[int, LeastRecentlyUsed] = {}

    def inserted(self, key: Key) -> None:
        self._layers.setdefault(key[0], LeastRecentlyUsed()).inserted(key)

    def used(self, key: Key) -> None:
        if key[0] in self._layers:
            self._layers[key[0]].used(key)

    def removed(self, key: Key) -> None:
        if key[0] in self._layers:
            self._layers[key[0]].removed(key)

    def victim(self, protected: Container[Key]) -> Key | None:
        for layer in sorted(self._layers.values(), key=len, reverse=True):
            found = layer.victim(protected)
            if found is not None:
                return found
        return None
