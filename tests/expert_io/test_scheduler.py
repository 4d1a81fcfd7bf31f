"""Symptoms: prefetch delays what compute waits for, reads what comes too late, or reads nothing."""

from __future__ import annotations

import pytest

from expert_io.calibration import Calibration
from expert_io.returns import Returns
from expert_io.scheduler import DiskPace, ExpectedGain, Guess, Pace
from expert_io.slices import BLOCK

LAYER_S, PIECE = 0.010, 1000
MIB = 1 << 20


def scheduler(
    share: float, piece_s: float, *, layer_s: float = LAYER_S, missing: bool = True
) -> ExpectedGain:
    """One that has seen guesses with score 1 come true in this share, layers take `layer_s`, and a
    piece take `piece_s` alone; it stands at step 1000, layer 0, time 0."""
    made = ExpectedGain()
    right = 0.0
    for step in range(Calibration.FIRST):
        right += share
        made.predicted((step, 0), 1, [(7, 1.0)], 1)
        picks = [7] if right >= 1 else [8]
        right -= right >= 1
        made.routed(step - 1000.0, step, 0, [], missing)
        made.routed(step - 1000.0 + layer_s, step, 1, picks, missing)
    made.disk.read(PIECE, piece_s, 1)
    made.predicted((1000, 0), 1, [(3, 1.0)], 1)
    made.routed(0.0, 1000, 0, [], missing)
    return made


def test_a_likely_guess_is_read_while_its_layer_is_far() -> None:
    best = scheduler(0.9, piece_s=0.005).best(0.0, PIECE, 0)
    assert best is not None and best.key == (1, 3) and 0.8 < best.probability < 0.95


def test_nothing_is_begun_just_before_the_routing_that_will_tell() -> None:
    made = scheduler(0.9, piece_s=0.005)
    assert made.best(0.5 * LAYER_S, PIECE, 0) is not None
    assert made.best(0.98 * LAYER_S, PIECE, 0) is None
    assert made.best(2 * LAYER_S, PIECE, 0) is None


def test_a_guess_likelier_wrong_than_right_is_never_read() -> None:
    assert scheduler(0.4, piece_s=0.001).best(0.0, PIECE, 0) is None


def test_the_longer_a_piece_the_surer_a_guess_has_to_be() -> None:
    """Wrong, it holds up the next layer's reads for 30 ms to save 10."""
    assert scheduler(0.7, piece_s=0.04).best(0.0, PIECE, 0) is None
    assert scheduler(0.95, piece_s=0.04).best(0.0, PIECE, 0) is not None


def test_a_slow_disk_is_no_obstacle_where_the_next_layer_never_misses() -> None:
    assert scheduler(0.7, piece_s=0.04, missing=False).best(0.0, PIECE, 0) is not None


def test_a_far_layer_gains_no_more_than_the_next_where_the_next_will_be_read_for() -> None:
    """Either is read for 10 ms until the next routing; beside the reads of a miss it gains none."""
    near, far = Guess((1, 3), 1000, 0.9), Guess((3, 3), 1000, 0.9)
    for missing in (True, False):
        made = scheduler(0.9, piece_s=0.04, missing=missing)
        gains = [made.gain(0.0, guess, PIECE, 0, evicts=True) for guess in (near, far)]
        assert gains[1] / gains[0] == pytest.approx(1.0 if missing else 3.0, rel=0.05)


def test_a_second_read_is_not_begun_where_one_has_the_whole_disk() -> None:
    made = scheduler(0.9, piece_s=0.005)
    made.disk.read(PIECE, 0.010, 2)
    assert made.best(0.0, PIECE, 1) is None
    beside = scheduler(0.9, piece_s=0.005)
    beside.disk.read(PIECE, 0.005, 2)
    assert beside.best(0.0, PIECE, 1) is not None


def test_victims_that_are_wanted_back_make_it_careful() -> None:
    made = scheduler(0.7, piece_s=0.008, missing=False)
    assert made.best(0.0, PIECE, 0) is not None
    for n in range(100):
        made.returns.evicted(50, (0, n))
        made.returns.wrong((1, n))
        made.returns.picked((0, n))
    made.returns.evicted(50)
    assert made.returns.regret > 0.9
    assert made.gain(0.0, next(iter(made._guesses.values())), PIECE, 0, evicts=True) < made.gain(
        0.0, next(iter(made._guesses.values())), PIECE, 0, evicts=False
    )


def test_a_guess_ends_with_its_layer() -> None:
    made = scheduler(0.9, piece_s=0.005)
    assert made.promising == 1
    assert made.routed(LAYER_S, 1000, 1, [3], False) == 1
    assert not made.promising and made.best(LAYER_S, PIECE, 0) is None


def test_what_is_said_again_from_the_same_layer_is_believed_by_its_own_record() -> None:
    """A source that is mostly wrong, then, before the layer's attention, one that is right."""
    made = ExpectedGain()
    for step in range(300):
        made.predicted((step, 0), 1, [(step % 7, 1.0)], 1)
        made.predicted((step, 0), 1, [(8, 1.0)], 1)
        made.routed(step * 1.0, step, 0, [], True)
        made.routed(step + LAYER_S, step, 1, [8] if step % 10 else [3], True)
    made.disk.read(PIECE, 0.001, 1)
    made.routed(400.0, 400, 0, [], True)
    made.predicted((400, 0), 1, [(3, 1.0)], 1)
    assert not made.promising
    made.predicted((400, 0), 1, [(8, 1.0)], 1)
    best = made.best(400.0, PIECE, 0)
    assert best is not None and best.key == (1, 8) and best.probability > 0.8


def test_what_a_nearer_layer_says_replaces_what_a_farther_one_said() -> None:
    made = scheduler(0.9, piece_s=0.005)
    made.predicted((1000, 0), 2, [(5, 1.0)], 1)
    made.predicted((1000, 1), 2, [(6, 1.0)], 1)
    made.taken((1, 3))
    best = made.best(0.0, PIECE, 0)
    assert best is not None and best.key == (2, 6)


def test_the_next_routing_is_counted_from_the_last_landing_where_compute_waited() -> None:
    pace = Pace()
    for step in range(5):
        begin = 100.0 * step
        pace.routed(begin, 0)
        pace.landed(begin + 50)
        pace.routed(begin + 53, 1)
        pace.routed(begin + 57, 2)
    assert pace.until(457.0) == pytest.approx(4, abs=0.5)
    pace.landed(470.0)
    assert pace.until(470.0) == pytest.approx(3, abs=0.5)
    assert pace.until(470.0, 4) == pytest.approx(7, abs=0.7)


def test_a_pause_between_answers_does_not_count_as_a_layer() -> None:
    pace = Pace()
    pace.routed(0.0, 0)
    pace.routed(1.0, 1)
    pace.routed(500.0, 0)
    assert pace.until(500.0) == pytest.approx(1.0)


def test_what_one_more_read_brings_is_measured() -> None:
    shares, owns = DiskPace(), DiskPace()
    for beside in (1, 2, 4):
        shares.read(PIECE, 0.001 * beside, beside)
        owns.read(PIECE, 0.004, beside)
    assert shares.adds(0) == owns.adds(0) == 1.0
    assert shares.adds(1) == pytest.approx(0.0) and owns.adds(1) == pytest.approx(1.0)
    assert owns.seconds(2 * PIECE, 2) == pytest.approx(0.008)


def test_a_piece_takes_as_many_steps_as_milliseconds() -> None:
    disk = DiskPace()
    assert disk.step(4 * MIB, 4) == 4 * MIB, "nothing is known yet"
    disk.read(MIB, 0.001, 1)
    assert [disk.step(4 * MIB, beside) for beside in (1, 2)] == [MIB, MIB // 2]
    assert disk.step(MIB + MIB // 2, 1) == MIB + MIB // 2
    # Whole blocks, at least one.
    assert disk.step(5 * BLOCK, 800) == BLOCK
    assert disk.step(MIB // 2 * 5 + BLOCK, 1) == MIB // 4 * 5 + BLOCK


def test_what_can_be_stopped_when_its_layer_is_routed_costs_others_a_step() -> None:
    made = scheduler(0.7, piece_s=0.04)
    guess = next(iter(made._guesses.values()))
    assert made.gain(0.0, guess, PIECE, 0, evicts=True) < 0, "a piece is less than a block"
    for _ in range(100):
        made.disk.read(MIB, 0.04, 1)
    step_s = made.disk.seconds(made.disk.step(MIB, 1), 1)
    assert step_s == pytest.approx(0.001, rel=0.2)
    gain = made.gain(0.0, guess, MIB, 0, evicts=True)
    expected = guess.probability * LAYER_S - (1 - guess.probability) * step_s
    assert gain == pytest.approx(expected)


def test_a_disk_seen_only_under_load_is_tried_alone() -> None:
    disk = DiskPace()
    disk.read(PIECE, 0.004, 4)
    assert disk.seconds(PIECE, 1) == pytest.approx(0.001)


def test_more_readers_than_were_ever_seen_can_be_asked_about() -> None:
    disk = DiskPace()
    disk.read(PIECE, 0.001, 1)
    assert disk.seconds(PIECE, 2) == pytest.approx(0.002)


def test_two_readers_are_tried_where_four_were_as_fast_as_one() -> None:
    disk = DiskPace()
    disk.read(PIECE, 0.004, 1)
    disk.read(PIECE, 0.004, 4)
    assert disk.adds(1) == pytest.approx(1.0)


def test_a_victim_is_missed_only_if_it_comes_before_the_guess() -> None:
    def regret(first: tuple[int, int]) -> float:
        returns = Returns()
        for _ in range(60):
            returns.evicted(100, (0, 1))
            returns.wrong((2, 2))
            returns.picked(first)
            returns.picked((0, 1))
            returns.picked((2, 2))
        return returns.regret

    assert regret((0, 1)) > 0.9 and regret((2, 2)) == 0.0


def test_pairs_nobody_wants_are_forgotten() -> None:
    returns = Returns()
    for n in range(500):
        returns.evicted(20, (0, n))
        returns.wrong((1, n))
    assert len(returns._pairs) <= 20 and len(returns._victims) <= 20
    assert returns.regret == 0.0
