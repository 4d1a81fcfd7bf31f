"""Services and readers as real processes that may look for messages without sleeping."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from launch.bench.expert_group import ExpertGroup
from protocol import counters
from protocol.busy_poll import BUSY_POLL_S
from protocol.transport import Channel
from tests.ipc.engram_process import EngramProcess
from tests.ipc.running_group import PATIENCE_S, cpu_seconds

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
SLOTS = 30
ALWAYS_S = 3600.0
# Processor time that only whoever looks without sleeping takes, and in how long at the earliest.
LOOKED_S, IDLE_S = 0.3, 1.0


def processor_times(pids: Mapping[str, int]) -> dict[str, float]:
    return {name: cpu_seconds(pid) for name, pid in pids.items()}


def await_looking(pids: Mapping[str, int], control: Channel) -> None:
    """Until each process has taken more than one that sleeps takes, while nobody says a word."""
    before, deadline = processor_times(pids), time.monotonic() + PATIENCE_S
    while any(now < before[name] + LOOKED_S for name, now in processor_times(pids).items()):
        assert time.monotonic() < deadline, "a process sleeps"
        assert control.receive(0.05) is None


def check_idle(pids: Mapping[str, int], control: Channel) -> None:
    """That a second in which nobody says a word takes no process's time."""
    before = processor_times(pids)
    assert control.receive(IDLE_S) is None
    taken = {name: now - before[name] for name, now in processor_times(pids).items()}
    assert max(taken.values()) < LOOKED_S, taken


def pids_of(group: ExpertGroup) -> dict[str, int]:
    return {name: child.pid for name, child in group.children.items()}


def test_whoever_may_look_does_and_still_hears_the_supervisor() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=1, busy_poll=ALWAYS_S) as group:
        group.fetch(0, [1])
        await_looking(pids_of(group), group.control)
        assert group.stats()["read_bytes"] > 0
        group.fetch(0, [2])
        group.stop()
        for child in group.children.values():
            assert child.process.wait(PATIENCE_S) == 0


def test_a_group_without_work_takes_no_processor_time() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=2, busy_poll=BUSY_POLL_S) as group:
        group.fetch(0, [1, 2, 3])
        group.hint(1, 0, [1, 2, 3], 1, [4, 5])
        check_idle(pids_of(group), group.control)


def test_what_is_read_in_the_background_keeps_nobody_awake() -> None:
    with ExpertGroup(
        MINI, slots=SLOTS, readers=2, busy_poll=ALWAYS_S, warm=[(0, 1), (1, 2)]
    ) as group:
        group.await_resident(0, [1])
        group.await_resident(1, [2])
        check_idle(pids_of(group), group.control)


def test_the_engram_service_looks_after_a_request_and_still_hears_the_supervisor() -> None:
    with EngramProcess(busy_poll=ALWAYS_S) as engram:
        engram.ask(0, [5, 6, 7])
        engram.answers(0)
        await_looking({"engram": engram.process.pid}, engram.control)
        assert engram.stats()[counters.ENGRAM_ROWS] > 0
        engram.ask(1, [8])
        engram.answers(1)
        assert engram.stop() == 0


def test_an_engram_service_without_requests_takes_no_processor_time() -> None:
    with EngramProcess(busy_poll=BUSY_POLL_S) as engram:
        engram.ask(0, [5, 6, 7])
        engram.answers(0)
        check_idle({"engram": engram.process.pid}, engram.control)
