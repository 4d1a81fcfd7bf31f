"""From a predictor's scores to probabilities, learned from what then happened.

A score may be a margin, a log-odds or anything else that is larger where a pick is likelier. The
log-odds of a pick are taken to be a straight line over it, which is learned one outcome at a time
(logistic regression by recursive Newton steps). So a predictor that is wrong about itself is
corrected, and one that is useless ends with probabilities that no read is worth. Few of the named
experts that are absent get picked, so a line tells the best of them apart where counts of equally
many outcomes mix them with hopeless ones.
"""

from __future__ import annotations

import math


class Calibration:
    """Until it has seen `FIRST` outcomes, `FIRST_PICKED` of them picks, it says 0: what is not
    known to be worth it is not read."""

    FIRST, FIRST_PICKED = 96, 12
    # How many outcomes it remembers, so that it follows a change of text.
    MEMORY = 1024.0
    # How unsure it is at first of slope and offset (variances), over scores of unit spread.
    UNSURE = 4.0
    MOST_UNSURE = 16.0

    def __init__(self) -> None:
        self._outcomes = self._picked = 0
        self._early: list[tuple[float, bool]] = []
        self._mean, self._spread = 0.0, 1.0
        self._slope, self._offset = 0.0, 0.0
        # Covariance of slope and offset.
        self._slopes, self._both, self._offsets = self.UNSURE, 0.0, self.UNSURE

    def probability(self, score: float) -> float:
        """The chance that an expert with this score is picked, 0 before enough is known."""
        if self._early or self._outcomes < self.FIRST or self._picked < self.FIRST_PICKED:
            return 0.0
        return self._predict((score - self._mean) / self._spread)

    def learn(self, score: float, picked: bool) -> None:
        """An expert with this score was picked, or was not."""
        self._outcomes += 1
        self._picked += picked
        if self._outcomes > self.FIRST:
            self._step((score - self._mean) / self._spread, picked)
            return
        self._early.append((score, picked))
        if self._outcomes == self.FIRST:
            self._begin()

    def _begin(self) -> None:
        """Scale the scores by the first ones, and learn those."""
        scores = [score for score, _ in self._early]
        self._mean = sum(scores) / len(scores)
        variance = sum((score - self._mean) ** 2 for score in scores) / len(scores)
        self._spread = math.sqrt(variance) or 1.0
        for score, picked in self._early:
            self._step((score - self._mean) / self._spread, picked)
        self._early.clear()

    def _predict(self, x: float) -> float:
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, self._slope * x + self._offset))))

    def _step(self, x: float, picked: bool) -> None:
        """One Newton step of the aged likelihood, whose curvature is the covariance's inverse."""
        p = self._predict(x)
        # What is forgotten makes it less sure again, of what is not being tried not beyond a bound.
        aged = 1 + 1 / self.MEMORY if max(self._slopes, self._offsets) < self.MOST_UNSURE else 1.0
        slopes, both, offsets = (aged * v for v in (self._slopes, self._both, self._offsets))
        gain_slope, gain_offset = slopes * x + both, both * x + offsets
        weight = p * (1 - p)
        shrink = weight / (1 + weight * (gain_slope * x + gain_offset))
        self._slopes = slopes - shrink * gain_slope * gain_slope
        self._both = both - shrink * gain_slope * gain_offset
        self._offsets = offsets - shrink * gain_offset * gain_offset
        self._slope += (self._slopes * x + self._both) * (picked - p)
        self._offset += (self._both * x + self._offsets) * (picked - p)
