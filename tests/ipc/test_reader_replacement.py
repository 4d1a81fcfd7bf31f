"""Symptoms: a reader that dies, hangs or is killed in the middle of a read ends the answer, changes
it, or is replaced for ever. Through the whole group, the supervisor replacing."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launch import processes
from launch.child import Child, spawn_child
from launch.processes import READER_RESTARTS
from protocol.errors import ProcessDied
from protocol.messages import Finished
from tests.ipc.running_group import MINIMUM_SLOTS, RunningGroup, collect, tokens_of

PROMPT = [0, *range(5, 25)]
TOKENS = 8


@cache
def reference() -> list[int]:
    """The answer of a group in which nothing happens."""
    with RunningGroup() as group:
        return group.tokens(PROMPT, TOKENS)


def replaced(group: RunningGroup) -> float:
    return group.stats()["supervisor"]["readers_replaced"]


@pytest.mark.parametrize(
    "faults, order_timeout, said",
    [
        ("die:after=20", 20.0, "killed by SIGABRT; replaced"),
        ("hang:after=20", 1.0, "no answer for"),
    ],
    ids=["dies", "hangs"],
)
def test_a_reader_that_fails_in_the_middle_changes_the_answer(
    faults: str, order_timeout: float, said: str
) -> None:
    with RunningGroup(readers=2, reader_faults=faults, order_timeout=order_timeout) as group:
        assert group.tokens(PROMPT, TOKENS) == reference()
        assert replaced(group) >= 1
        assert any(name.startswith("reader-") and said in line for name, line in group.lines)
        # The replacements serve the next request, too.
        assert group.tokens(PROMPT, TOKENS) == reference()


async def happens(condition: Callable[[], bool]) -> None:
    """The group's loop goes on until then."""
    while not condition():
        await asyncio.sleep(0.005)


def test_children_asked_to_end_with_the_supervisor_are_mourned() -> None:
    """As a service manager does it, where the children's signals come first."""
    with RunningGroup(readers=2) as group:
        for pid in group.group.pids.values():
            os.kill(pid, signal.SIGTERM)
        group.run(happens(lambda: not group.group.pids))
        group.run(group.group.stop())
        assert group.lines == []


@pytest.mark.parametrize("name", ["reader-1", "experts"])
def test_one_that_alone_is_asked_to_end_is_missed(name: str) -> None:
    with RunningGroup(readers=2) as group:
        os.kill(group.group.pids[name], signal.SIGTERM)
        if name == "experts":
            with pytest.raises(ProcessDied, match="experts ended: killed by SIGTERM"):
                group.tokens(PROMPT, TOKENS)
        else:
            group.run(happens(lambda: bool(group.lines)))
            assert group.lines == [("reader-1", "killed by SIGTERM; replaced")]
            assert group.tokens(PROMPT, TOKENS) == reference()


def test_readers_killed_in_the_middle_of_a_slow_read_change_the_answer() -> None:
    with RunningGroup(readers=2, reader_faults="delay:seconds=0.02") as group:
        events = group.open(PROMPT, TOKENS)
        seen = []
        while not tokens_of(seen):
            seen.append(group.run(anext(events)))
        # Each read takes long enough that both are in one now.
        for name in ("reader-0", "reader-1"):
            os.kill(group.group.pids[name], signal.SIGKILL)
        seen += group.run(collect(events))
        assert tokens_of(seen) == reference()
        assert replaced(group) == 2


def test_a_reader_that_dies_whenever_it_reads_is_replaced_for_ever() -> None:
    with RunningGroup(readers=1) as group:
        pids: set[int] = set()
        with pytest.raises(ProcessDied, match="readers within 60 s ended, which is no accident"):
            while len(pids) <= READER_RESTARTS:
                pid = group.group.pids["reader-0"]
                pids.add(pid)
                os.kill(pid, signal.SIGKILL)
                # A read is what shows that the next one serves.
                group.tokens([0, *range(5 + len(pids), 25)], 1)
        assert len(pids) == READER_RESTARTS + 1


def test_a_read_that_fails_for_good_takes_the_group_with_it() -> None:
    with RunningGroup(slots=MINIMUM_SLOTS, reader_faults="eio:after=60:times=4") as group:
        end = group.events(PROMPT, TOKENS)[-1]
        assert isinstance(end, Finished) and (end.reason, end.failure) == ("error", "read")
        assert "safetensors" in end.error and "\n" not in end.error
        # The disk recovers within four reads, and a request fails at one at least.
        answers = [group.events(PROMPT, TOKENS) for _ in range(4)]
        assert tokens_of(answers[-1]) == reference()
        assert replaced(group) == 0


@pytest.mark.parametrize(
    "refusal", [OSError(errno.EMFILE, "Too many"), RuntimeError("can't start new thread")]
)
def test_a_moment_without_room_for_a_reader_ends_the_group(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    refusals = [refusal] * 3

    def spawn(*arguments: Any, **more: Any) -> Child:
        if refusals:
            raise refusals.pop()
        return spawn_child(*arguments, **more)

    with RunningGroup(readers=1) as group:
        monkeypatch.setattr(processes, "spawn_child", spawn)
        os.kill(group.group.pids["reader-0"], signal.SIGKILL)
        assert group.tokens(PROMPT, TOKENS) == reference()
        assert replaced(group) == 1 and not refusals


def test_a_reader_that_cannot_be_replaced_is_waited_for() -> None:
    """Whoever sweeps /tmp takes the sockets away; those that are open go on."""
    with RunningGroup(readers=1) as group:
        for path in Path(group.group.endpoints).iterdir():
            path.unlink()
        os.kill(group.group.pids["reader-0"], signal.SIGKILL)
        with pytest.raises(ProcessDied, match=r"cannot be replaced: .* was deleted or emptied"):
            group.tokens(PROMPT, TOKENS)
