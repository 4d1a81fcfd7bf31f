"""Symptoms: a boastful predictor is believed, a useless one is acted on, an old habit is kept."""

from __future__ import annotations

import random

from expert_io.calibration import Calibration


def taught(chance_of: list[float], outcomes: int, seed: int = 0) -> Calibration:
    """A calibration that saw scores 0, 1, … come true as often as `chance_of` says."""
    calibration, chance = Calibration(), random.Random(seed)
    for _ in range(outcomes):
        score = chance.randrange(len(chance_of))
        calibration.learn(float(score), chance.random() < chance_of[score])
    return calibration


def test_nothing_is_promised_before_enough_has_been_seen() -> None:
    calibration = Calibration()
    for _ in range(Calibration.FIRST - 1):
        calibration.learn(5.0, True)
        assert calibration.probability(5.0) == 0.0
    calibration.learn(5.0, True)
    assert calibration.probability(5.0) > 0.95


def test_probabilities_are_what_came_true_whatever_the_scores_claim() -> None:
    calibration = taught([0.05, 0.3, 0.6, 0.95], 4000)
    for score, share in enumerate([0.05, 0.3, 0.6, 0.95]):
        assert abs(calibration.probability(float(score)) - share) < 0.08


def test_a_score_that_says_nothing_gets_the_average_everywhere() -> None:
    calibration = taught([0.2] * 8, 6000)
    assert all(abs(calibration.probability(float(score)) - 0.2) < 0.1 for score in range(8))


def test_a_predictor_that_turns_bad_is_not_believed_for_long() -> None:
    calibration = taught([0.1, 0.9], 2000)
    for _ in range(1000):
        calibration.learn(1.0, False)
    assert calibration.probability(1.0) < 0.2


def test_the_few_likely_ones_stand_out_from_many_that_are_not() -> None:
    """Most absent experts that are named have no chance; one in fifty is nearly sure."""
    calibration, chance = Calibration(), random.Random(3)
    for _ in range(4000):
        score = 2.0 if chance.random() < 0.02 else chance.gauss(-4, 1)
        calibration.learn(score, chance.random() < 1 / (1 + 2.718**-score))
    assert calibration.probability(2.0) > 0.75 and calibration.probability(-3.0) < 0.1


def test_scores_beyond_all_seen_count_as_the_nearest() -> None:
    calibration = taught([0.1, 0.9], 2000)
    assert calibration.probability(1e9) > 0.7 and calibration.probability(-1e9) < 0.3
