"""Whether experts that gave way to a guess are wanted back, and how often a wrong guess is used.

A wrong guess costs its victim only in so far as the victim would have been the more useful of the
two; both are watched for as many evictions as there are residents, and the difference is the
regret.
"""

from __future__ import annotations

from collections import OrderedDict

from expert_io.policy import Key

NEWEST = 0.05
# Before anything is known, a victim is taken to be wanted back this often.
SUSPECTED = 0.25


class _Watched:
    """Keys under watch since an eviction count, and how large a share of them came true."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._since: OrderedDict[Key, int] = OrderedDict()

    def watch(self, key: Key, evictions: int) -> None:
        self._since[key] = evictions
        self._since.move_to_end(key)

    def wanted(self, key: Key) -> bool:
        """`key` was picked; whether it was watched."""
        if self._since.pop(key, None) is None:
            return False
        self.share += NEWEST * (1 - self.share)
        return True

    def expire(self, before: int) -> None:
        while self._since and next(iter(self._since.values())) < before:
            self._since.popitem(last=False)
            self.share -= NEWEST * self.share


class Returns:
    """Victims of predictions and guesses that proved wrong, each watched for a while."""

    def __init__(self) -> None:
        self._victims = _Watched(SUSPECTED)
        self._wrong = _Watched(0.0)
        self._evictions = 0

    @property
    def regret(self) -> float:
        """How much likelier a victim is wanted back than a wrong guess is used, 0 to 1."""
        return max(0.0, self._victims.share - self._wrong.share)

    def evicted(self, resident: int, victim: Key | None = None) -> None:
        """An eviction, of `victim` for a prediction or of another key."""
        self._evictions += 1
        if victim is not None:
            self._victims.watch(victim, self._evictions)
        for watched in (self._victims, self._wrong):
            watched.expire(self._evictions - resident)

    def wrong(self, key: Key) -> None:
        """`key` is resident for a prediction that has not come true."""
        self._wrong.watch(key, self._evictions)

    def picked(self, key: Key) -> bool:
        """`key` is picked; whether it was evicted for a prediction."""
        self._wrong.wanted(key)
        return self._victims.wanted(key)
