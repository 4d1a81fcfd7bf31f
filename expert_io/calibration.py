"""From a predictor's scores to probabilities, learned from what then happened.

A score may be a margin, a log-odds or anything else that is larger where a pick is likelier; how
often experts with such a score were picked is all that counts. So a predictor that is wrong about
itself is corrected, and one that is useless ends with probabilities that no read is worth.
"""

from __future__ import annotations

from bisect import bisect_right


class Calibration:
    """A histogram over ranges of scores that hold about equally many of the first outcomes.

    Until it has seen `FIRST` outcomes it says 0: what is not known to be worth it is not read.
    """

    FIRST, RANGES = 96, 12
    # A range forgets half once it has this many outcomes, so that it follows a change of text.
    FORGET_AT = 256.0
    # A range is believed as if it had also seen this many outcomes of the average kind.
    PRIOR = 4.0

    def __init__(self) -> None:
        self._early: list[tuple[float, bool]] = []
        self._edges: list[float] = []
        self._seen: list[float] = []
        self._picked: list[float] = []

    def probability(self, score: float) -> float:
        """The chance that an expert with this score is picked, 0 before enough is known."""
        if not self._seen:
            return 0.0
        place = bisect_right(self._edges, score)
        average = sum(self._picked) / sum(self._seen)
        return (self._picked[place] + self.PRIOR * average) / (self._seen[place] + self.PRIOR)

    def learn(self, score: float, picked: bool) -> None:
        """An expert with this score was picked, or was not."""
        if not self._seen:
            self._early.append((score, picked))
            if len(self._early) == self.FIRST:
                self._begin()
            return
        place = bisect_right(self._edges, score)
        self._seen[place] += 1
        self._picked[place] += picked
        if self._seen[place] >= self.FORGET_AT:
            self._seen[place] /= 2
            self._picked[place] /= 2

    def _begin(self) -> None:
        ordered = sorted(score for score, _ in self._early)
        step = self.FIRST / self.RANGES
        edges = {ordered[int(n * step)] for n in range(1, self.RANGES)}
        # An edge at the lowest score would leave a range below it that nothing falls into.
        self._edges = sorted(edges - {ordered[0]})
        self._seen = [0.0] * (len(self._edges) + 1)
        self._picked = [0.0] * (len(self._edges) + 1)
        early, self._early = self._early, []
        for score, picked in early:
            self.learn(score, picked)
