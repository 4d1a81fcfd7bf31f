"""Symptoms: most of what prefetch reads is wrong, or what would mostly be right is left unread."""

from __future__ import annotations

import random

import pytest

from expert_io.least_probability import HIGHEST, LOWEST, LeastProbability
from tests.expert_io.test_scheduler import LAYER_S, PIECE, scheduler


@pytest.mark.parametrize("promises", [0.7, 1.0, 1.4])
def test_most_of_what_is_read_comes_true_whatever_probabilities_promise(promises: float) -> None:
    """Guesses of any probability, which come true `promises` times less often than they say."""
    chance, least = random.Random(1), LeastProbability()
    right = []
    while len(right) < 4000:
        probability = chance.random()
        if probability >= least.value:
            right.append(chance.random() < min(1.0, probability / promises))
            least.learn(right[-1])
    share = sum(right) / len(right)
    assert 0.6 < share < 0.7 or (share >= 0.7 and least.value < 1.1 * LOWEST)


def test_it_turns_back_soon_after_a_long_time_at_a_bound() -> None:
    low, high = LeastProbability(), LeastProbability()
    for _ in range(10_000):
        low.learn(True)
        high.learn(False)
    assert (low.value, high.value) == (LOWEST, HIGHEST)
    for _ in range(60):
        low.learn(False)
        high.learn(True)
    assert low.value > 0.5 > LOWEST and high.value < HIGHEST - 0.05


def test_reads_that_come_true_open_the_way_for_less_likely_ones() -> None:
    made = scheduler(0.5, piece_s=0.001)
    assert made.best(0.0, PIECE, 0) is None
    for step in range(2000, 2100):
        made.predicted((step, 0), 1, [(3, 1.0)], 1)
        made.begun(next(iter(made._guesses.values())))
        made.routed(0.0, step, 1, [3], False)
    # Guesses with this score have come true since; what was learned of them is put aside.
    made._calibrations.update(scheduler(0.5, piece_s=0.001)._calibrations)
    made.predicted((3000, 0), 1, [(3, 1.0)], 1)
    made.routed(0.0, 3000, 0, [], True)
    best = made.best(0.0, PIECE, 0)
    assert best is not None and best.probability < 0.6


def test_only_what_was_begun_counts_and_only_by_its_own_layer() -> None:
    made = scheduler(0.9, piece_s=0.001)
    before = made.least.value
    made.routed(LAYER_S, 1000, 1, [3], False)
    assert made.least.value == before, "it was not read"
    made.predicted((1001, 0), 1, [(3, 1.0)], 1)
    made.begun(next(iter(made._guesses.values())))
    made.routed(2 * LAYER_S, 1002, 1, [4], False)
    assert made.least.value == before, "its pass was given up before its layer"
    made.predicted((1003, 0), 1, [(3, 1.0)], 1)
    made.begun(next(iter(made._guesses.values())))
    made.routed(3 * LAYER_S, 1003, 0, [3], False)
    assert made.least.value == before, "its layer is still ahead"
    made.routed(4 * LAYER_S, 1003, 1, [4], False)
    assert made.least.value > before
    after = made.least.value
    made.routed(5 * LAYER_S, 1004, 1, [4], False)
    assert made.least.value == after, "once"
