"""Service and readers as real processes that may look for messages without sleeping."""

from __future__ import annotations

import time
from pathlib import Path

from launch.bench.expert_group import ExpertGroup
from protocol.busy_poll import BUSY_POLL_S
from tests.ipc.running_group import PATIENCE_S, cpu_seconds

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
SLOTS = 30
ALWAYS_S = 3600.0
# Processor time that only whoever looks without sleeping takes, and in how long at the earliest.
LOOKED_S, IDLE_S = 0.3, 1.0


def processor_times(group: ExpertGroup) -> dict[str, float]:
    return {name: cpu_seconds(child.pid) for name, child in group.children.items()}


def taken_in_an_idle_second(group: ExpertGroup) -> dict[str, float]:
    """Processor time of each process while nobody says a word."""
    before = processor_times(group)
    assert group.control.receive(IDLE_S) is None
    return {name: now - before[name] for name, now in processor_times(group).items()}


def test_whoever_may_look_does_and_still_hears_the_supervisor() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=1, busy_poll=ALWAYS_S) as group:
        group.fetch(0, [1])
        before, deadline = processor_times(group), time.monotonic() + PATIENCE_S
        while any(now < before[name] + LOOKED_S for name, now in processor_times(group).items()):
            assert time.monotonic() < deadline, "a process sleeps"
            assert group.control.receive(0.05) is None
        assert group.stats()["read_bytes"] > 0
        group.fetch(0, [2])
        group.stop()
        for child in group.children.values():
            assert child.process.wait(PATIENCE_S) == 0


def test_a_group_without_work_takes_no_processor_time() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=2, busy_poll=BUSY_POLL_S) as group:
        group.fetch(0, [1, 2, 3])
        group.hint(1, 0, [1, 2, 3], 1, [4, 5])
        taken = taken_in_an_idle_second(group)
    assert max(taken.values()) < LOOKED_S, taken


def test_what_is_read_in_the_background_keeps_nobody_awake() -> None:
    with ExpertGroup(
        MINI, slots=SLOTS, readers=2, busy_poll=ALWAYS_S, warm=[(0, 1), (1, 2)]
    ) as group:
        group.await_resident(0, [1])
        group.await_resident(1, [2])
        taken = taken_in_an_idle_second(group)
    assert max(taken.values()) < LOOKED_S, taken
