"""Whether an expert that gave its slot to a guess would have been the more useful of the two.

A wrong guess costs its victim only if the victim is picked before the guess is. Each pair is
watched for as many evictions as there are residents, about as long as either would have stayed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from expert_io.policy import Key

NEWEST = 0.05
MOST_UNPAIRED = 8


@dataclass(slots=True)
class _Pair:
    guess: Key
    victim: Key
    since: int


class Returns:
    """Victims of predictions, and the wrong guesses that took their place."""

    def __init__(self) -> None:
        # How much more often the victim was picked first, of all wrong guesses; -1 to 1.
        self._balance = 0.0
        self._victims: dict[Key, int] = {}  # evicted for a prediction, at which eviction
        self._unpaired: deque[Key] = deque(maxlen=MOST_UNPAIRED)
        self._pairs: list[_Pair] = []
        self._evictions = 0

    @property
    def regret(self) -> float:
        """How much likelier a victim is wanted back than a wrong guess is used, 0 to 1."""
        return max(0.0, self._balance)

    def evicted(self, resident: int, victim: Key | None = None) -> None:
        """An eviction, of `victim` for a prediction or of another key."""
        self._evictions += 1
        over = self._evictions - resident
        if victim is not None:
            self._victims[victim] = self._evictions
            self._unpaired.append(victim)
        self._victims = {key: at for key, at in self._victims.items() if at > over}
        for pair in [pair for pair in self._pairs if pair.since <= over]:
            self._settle(pair, 0.0)

    def came_true(self) -> None:
        """A landed guess was picked: its victim would have had to go anyway."""
        if self._unpaired:
            self._unpaired.popleft()

    def cancelled(self) -> None:
        """A wrong guess gave its slot back before it was whole; nothing had to go for it."""
        self._count(0.0)

    def wrong(self, guess: Key) -> None:
        """`guess` is resident, its layer is routed, and it was not picked."""
        if self._unpaired:
            self._pairs.append(_Pair(guess, self._unpaired.popleft(), self._evictions))

    def picked(self, key: Key) -> bool:
        """`key` is picked; whether it was evicted for a prediction lately."""
        for pair in [pair for pair in self._pairs if key in (pair.guess, pair.victim)]:
            self._settle(pair, 1.0 if key == pair.victim else -1.0)
        return self._victims.pop(key, None) is not None

    def _settle(self, pair: _Pair, outcome: float) -> None:
        self._pairs.remove(pair)
        self._count(outcome)

    def _count(self, outcome: float) -> None:
        self._balance += NEWEST * (outcome - self._balance)
