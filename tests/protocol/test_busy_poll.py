"""Symptoms: processes that keep a core which others need, or for ever; ones that never look."""

from __future__ import annotations

import os

import pytest

from protocol import busy_poll
from protocol.busy_poll import BUSY_POLL_S, BusyPoll, busy_poll_seconds


class Clock:
    """A clock that a test turns, and how often a core was offered to others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.offered = 1000.0, 0
        monkeypatch.setattr(busy_poll.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(os, "sched_yield", self._offer)

    def _offer(self) -> None:
        self.offered += 1


@pytest.mark.parametrize(
    ("cores", "readers", "compute_threads", "looks"),
    [
        (16, 4, 1, True),
        (9, 4, 1, True),
        (8, 4, 1, False),
        (6, 1, 1, True),
        (2, 1, 1, False),
        (64, 4, 64, False),
        (16, 12, 1, False),
    ],
)
def test_processes_look_where_each_has_a_core(
    cores: int, readers: int, compute_threads: int, looks: bool
) -> None:
    assert busy_poll_seconds(cores, readers, compute_threads) == (BUSY_POLL_S if looks else 0.0)


def test_looking_ends_a_while_after_the_last_reason_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, polling = Clock(monkeypatch), BusyPoll(2.0)
    assert not polling.look_again()  # nothing has happened yet
    polling.expect_more()
    clock.now += 1.5
    assert polling.look_again()
    polling.expect_more()
    clock.now += 1.5
    assert polling.look_again()
    clock.now += 0.5
    assert not polling.look_again()
    assert clock.offered == 2  # each time before it looked again


def test_whoever_may_not_look_sleeps_at_once() -> None:
    polling = BusyPoll(0.0)
    polling.expect_more()
    assert not polling.look_again()
