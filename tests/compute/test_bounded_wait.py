"""Symptoms: a wait that sleeps though it was told to look, or keeps its core without being told."""

from __future__ import annotations

import pytest

from compute import bounded_wait
from compute.bounded_wait import NAP_S, NAPPING_S, WAKE_S, BoundedWait

LOOKING_S = 0.0625  # exact in binary, and shorter than it naps


def test_a_wait_looks_then_naps_and_then_waits_for_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = [1000.0], []
    monkeypatch.setattr(bounded_wait.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(bounded_wait.time, "sleep", slept.append)
    waiting = BoundedWait(60.0, busy_poll=LOOKING_S)
    assert waiting.nap() == 0.0 and slept == []
    now[0] += LOOKING_S
    assert waiting.nap() == 0.0 and slept == [NAP_S]
    now[0] += NAPPING_S
    assert waiting.nap() == WAKE_S and slept == [NAP_S]


def test_without_being_told_a_wait_naps_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(bounded_wait.time, "sleep", slept.append)
    assert BoundedWait(60.0).nap() == 0.0
    assert slept == [NAP_S]
