"""Symptoms: one failed, slow or abandoned request that spoils the next; a death that leaves others
waiting; a start that fails and leaves something; a long answer that gets slower and slower."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from launch import processes
from launch.memory import oom_kills
from launch.synth.command import synthesize
from protocol import counters
from protocol.errors import ProcessDied, StallError, UsageError
from protocol.messages import Finished, PrefillProgress, TokenEvent
from protocol.wire import VERSION
from tests.ipc.running_group import (
    END_S,
    RunningGroup,
    children_of,
    collect,
    cpu_seconds,
    killed,
    memory_of,
    own_bytes,
    tokens_of,
)

PROMPT = [0, *range(5, 25)]
LONG = [0, *(3 + i % 490 for i in range(400))]
CHUNK = 8
TOKENS = 6
# A busy machine lets a process wait too.
SILENCE_S = 1.5
# The keys and values of 1,000 tokens, and what an allocator keeps for later.
GROWTH_BYTES = 8 << 20


@pytest.fixture(scope="module")
def group() -> Iterator[RunningGroup]:
    with RunningGroup(readers=2, chunk_tokens=CHUNK, stall_timeout=3.0) as started:
        yield started


@pytest.fixture(scope="module")
def answer(group: RunningGroup) -> list[int]:
    return group.tokens(PROMPT, TOKENS)


def test_a_request_left_early_holds_up_the_next(group: RunningGroup, answer: list[int]) -> None:
    before = group.stats()["compute"][counters.STEPS]
    events = group.open(LONG, 100)
    while True:
        event = group.run(anext(events))
        if isinstance(event, PrefillProgress) and event.done >= CHUNK:
            break
    group.run(events.aclose())  # type: ignore[attr-defined]
    assert group.tokens(PROMPT, TOKENS) == answer
    # Of 50 chunks only those that were under way, and the answer's own passes.
    assert group.stats()["compute"][counters.STEPS] - before < 10 + len(PROMPT) // CHUNK + TOKENS


def test_a_request_that_compute_would_drop_is_waited_for(group: RunningGroup) -> None:
    with pytest.raises(UsageError, match="seed"):
        group.tokens(PROMPT, TOKENS, seed=1 << 63)


def test_two_requests_at_once_get_each_others_tokens(
    group: RunningGroup, answer: list[int]
) -> None:
    other = [0, *range(40, 50)]
    expected = group.tokens(other, TOKENS)
    first, second = group.open(PROMPT, TOKENS), group.open(other, TOKENS)
    seen = [group.run(anext(first))]
    seconds = [group.run(anext(second))]
    seen += group.run(collect(first))
    seconds += group.run(collect(second))
    assert tokens_of(seen) == answer
    assert tokens_of(seconds) == expected


def test_a_stopped_expert_service_is_a_hang_or_ends_the_group(
    group: RunningGroup, answer: list[int]
) -> None:
    pid = group.group.pids["experts"]
    events = group.open(LONG, 100)
    group.run(anext(events))
    os.kill(pid, signal.SIGSTOP)
    try:
        end = group.run(collect(events))[-1]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(end, Finished) and (end.reason, end.failure) == ("error", "stall")
    assert "did not come within 3" in end.error and "layer" in end.error
    assert group.tokens(PROMPT, TOKENS) == answer


def test_senseless_frames_on_the_control_socket_do_harm(
    group: RunningGroup, answer: list[int]
) -> None:
    before = group.stats()["supervisor"]["malformed_messages"]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"ipc://{group.group.endpoints}/control")
    own = bytes((VERSION,))
    for frame in (b"", own, b"\x07\x01\x90", own + b"\x03\xc1", os.urandom(3000)):
        stranger.send(frame)
    # Of another request, and of none.
    stranger.send(TokenEvent(10**9, 5, "no", None, [], []).encode())
    stranger.send(Finished(-1, "stop", "", "", "", 0, 0, 0, {}).encode())
    assert group.tokens(PROMPT, TOKENS) == answer
    while group.stats()["supervisor"]["malformed_messages"] < before + 5:
        pass
    context.destroy(linger=0)


def test_rows_that_cannot_be_read_spoil_more_than_their_request(answer: list[int]) -> None:
    # Both tables are one read of codes and one of scales here, each tried three times.
    with RunningGroup(engram_faults="eio:times=6", chunk_tokens=CHUNK) as broken:
        end = broken.events(PROMPT, TOKENS)[-1]
        assert isinstance(end, Finished) and (end.reason, end.failure) == ("error", "read")
        assert "engram" in end.error and ".safetensors" in end.error and "\n" not in end.error
        assert broken.tokens(PROMPT, TOKENS) == answer


def test_a_death_by_the_kernel_for_lack_of_memory_is_called_a_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with RunningGroup() as group:
        before = oom_kills()
        # What the kernel counts before the process is gone.
        monkeypatch.setattr(processes, "oom_kills", lambda: before + 1)
        killed(group.group.pids["compute"])
        with pytest.raises(ProcessDied, match=r"out of memory: cache and dense .* smaller --cache"):
            watch(group)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", ["experts", "compute"])
def test_a_death_leaves_an_open_request_waiting(name: str) -> None:
    descriptors = open_descriptors()
    with RunningGroup() as group:
        one, other = group.open(PROMPT, 5000), group.open(LONG, 5000)
        group.run(anext(one))
        group.run(anext(one))
        children = set(group.group.pids.values())
        begin = time.monotonic()
        killed(group.group.pids[name])
        for events in (one, other, group.open(PROMPT, 1)):
            with pytest.raises(ProcessDied, match=f"^{name} ended: killed by SIGKILL"):
                group.run(collect(events))
        group.run(group.group.stop())
        assert time.monotonic() - begin < END_S
        assert not children & set(children_of(os.getpid()))
        assert group.lines == []
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("name", ["engram", "compute"])
def test_a_stopped_process_is_never_noticed(name: str) -> None:
    with RunningGroup(silence_timeout=SILENCE_S) as group:
        group.tokens(PROMPT, 1)
        pid = group.group.pids[name]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ProcessDied) as died:
            # One is waited for by a request, the other might never be.
            group.run(collect(group.open(LONG, 5000))) if name == "compute" else watch(group)
        assert str(died.value) == (
            f"{name} gave no sign of life for {SILENCE_S:g} s (it is stopped, as by SIGSTOP) and "
            "was killed; where it only needs longer, --silence-timeout allows"
        )
        assert pid not in children_of(os.getpid())


def watch(group: RunningGroup) -> None:
    """Until the group has ended by itself."""
    while group.group.failure is None:
        group.run(asyncio.sleep(0.01))
    raise group.group.failure


def test_a_stopped_idle_reader_is_never_replaced(answer: list[int]) -> None:
    with RunningGroup(readers=2, silence_timeout=SILENCE_S) as group:
        pid = group.group.pids["reader-1"]
        os.kill(pid, signal.SIGSTOP)
        while not group.lines:
            group.run(asyncio.sleep(0.01))
        assert "no sign of life" in group.lines[0][1] and "replaced" in group.lines[0][1]
        assert group.group.pids["reader-1"] != pid
        assert group.tokens(PROMPT, TOKENS) == answer


def test_a_start_that_fails_leaves_something_behind(tmp_path: Path) -> None:
    me = os.getpid()
    before = open_descriptors(), set(children_of(me)), memory_of(me)
    with (
        pytest.raises(StallError, match="start of compute, engram, experts, reader-0: no answer"),
        # Less than any of them takes to load its libraries.
        RunningGroup(start_timeout=0.05, runtime_dir=tmp_path),
    ):
        raise AssertionError("it cannot have started")
    assert (open_descriptors(), set(children_of(me)), memory_of(me)) == before
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Account:
    """What a group has done up to a moment; all of it but `memory` grows with the tokens."""

    steps: float
    work: dict[str, float]
    memory: dict[str, int]
    queued: float

    @classmethod
    def take(cls, group: RunningGroup) -> Account:
        stats, pids = group.stats(), group.group.pids
        steps = stats["compute"][counters.STEPS]
        work = {f"processor time of {name}": cpu_seconds(pid) for name, pid in pids.items()}
        for name in (counters.DEMAND_MISSES, counters.DEMAND_HITS):
            work[name] = stats["compute"][name]
        for name in (counters.READ_BYTES, counters.EVICTIONS):
            work[name] = stats["experts"][name]
        memory = {name: own_bytes(pid) for name, pid in pids.items()}
        return cls(steps, work, memory, stats["experts"][counters.QUEUE_DEPTH])

    def a_step_until(self, later: Account) -> dict[str, float]:
        """Work of each kind for one token between here and `later`."""
        steps = later.steps - self.steps
        return {name: (later.work[name] - amount) / steps for name, amount in self.work.items()}


@pytest.mark.timeout(400)
def test_a_long_answer_gets_slower_or_larger_the_longer_it_gets(tmp_path: Path) -> None:
    """1,000 tokens with a cache of one token's experts, in work done: the machine may be busy."""
    synthesize(tmp_path / "three", "mini", {"num_hidden_layers": 3}, seed=0)
    with RunningGroup(tmp_path / "three", slots=15) as group:
        events = group.open([0, 5, 6], 1000, temperature=1.0)
        accounts = {}
        for count in range(1000):
            while not isinstance(group.run(anext(events)), TokenEvent):
                pass
            if count in (100, 500, 800, 999):
                accounts[count] = Account.take(group)
        assert isinstance(group.run(anext(events)), Finished)
        idle = Account.take(group)
    usual = accounts[100].a_step_until(accounts[500])
    at_last = accounts[800].a_step_until(accounts[999])
    assert usual[counters.DEMAND_MISSES] > 2
    for name, amount in usual.items():
        assert at_last[name] < 1.3 * amount, name
    for name, size in accounts[500].memory.items():
        assert idle.memory[name] - size < GROWTH_BYTES, name
    assert idle.queued == 0
