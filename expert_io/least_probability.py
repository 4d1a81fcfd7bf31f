"""How likely a guess must be to be read, so that most of what is read comes true.

Expected gain weighs waiting alone. A disk also has its heat, its wear and other users, so of the
guesses that are read a share of `RIGHT` is to come true. How likely a guess has to be for that
depends on the predictor, the text and how much is missing: where guesses hardly go wrong, less
likely ones may be read too, and where little is missing to learn probabilities from, they promise
too much. So each outcome moves the bound, in log-odds, up by a wrong guess and down by a right
one, in a proportion that comes to rest where the share is reached (stochastic approximation).
"""

from __future__ import annotations

import math

# More than the 60 % that is promised: what is learned swings about its mark.
RIGHT = 0.62
STEP = 0.05
FIRST, LOWEST, HIGHEST = 0.65, 0.3, 0.9


class LeastProbability:
    """The bound, as `value`; between `LOWEST` and `HIGHEST`."""

    def __init__(self) -> None:
        self.value = FIRST

    def learn(self, right: bool) -> None:
        """A guess that was read came true, or did not."""
        moved = math.log(self.value / (1 - self.value)) + STEP * (RIGHT - right)
        self.value = min(HIGHEST, max(LOWEST, 1 / (1 + math.exp(-moved))))
