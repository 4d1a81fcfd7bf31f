"""Symptoms: orphans after a kill, a service that believes a stranger, a frame that ends it, a trace
that says nothing, an emulated disk that is not slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from launch.bench.expert_group import ExpertGroup
from protocol import counters
from protocol.layouts import ABSENT
from protocol.messages import (
    Demand,
    Hint,
    ReadDone,
    ReaderHello,
    ReaderStuck,
    ReadFailed,
    ReadStopped,
    StatsReply,
    StatsRequest,
    TraceStart,
    TraceStop,
    TraceStopped,
)
from tests.ipc.teaching import teach

ROOT = Path(__file__).parents[2]
MINI = ROOT / "tests" / "golden" / "data" / "mini"
SLOTS = 30
PARENT = """
import sys
from pathlib import Path
from launch.bench.expert_group import ExpertGroup
with ExpertGroup(Path(sys.argv[1]), slots=30, readers=2, faults=sys.argv[2]) as group:
    group.ask(0, [1, 2, 3])
    print(*(child.pid for child in group.children.values()), group.endpoints.control, flush=True)
    sys.stdin.read()
"""


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("faults", ["", "hang"])
def test_a_killed_parent_leaves_no_process(faults: str) -> None:
    command = [sys.executable, "-c", PARENT, str(MINI), faults]
    pipe = subprocess.PIPE
    parent = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    assert parent.stdout is not None
    *pids, control = parent.stdout.readline().split()
    assert len(pids) == 3 and all(alive(int(pid)) for pid in pids)
    parent.kill()
    parent.communicate(timeout=10)
    deadline = time.monotonic() + 2
    while any(alive(int(pid)) for pid in pids):
        assert time.monotonic() < deadline, "orphans"
    directory = Path(control.removeprefix("ipc://")).parent
    # SIGKILL leaves the parent's directory of sockets to the next start; only that.
    for socket in directory.iterdir():
        socket.unlink()
    directory.rmdir()


def stranger(group: ExpertGroup, endpoint: str, identity: str) -> zmq.Socket[bytes]:
    socket = group.context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.connect(endpoint)
    return socket


def await_malformed(group: ExpertGroup, count: int) -> None:
    deadline = time.monotonic() + 20
    while group.stats()[counters.MALFORMED_MESSAGES] < count:
        assert time.monotonic() < deadline


def test_answers_to_orders_nobody_holds_change_nothing() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=1, faults="hang:expert=0.1") as group:
        group.fetch(0, [0])
        group.ask(0, [1])
        liar = stranger(group, group.endpoints.readers, "liar")
        lies = [
            ReadDone(0, 0, 9999, 0.1),
            ReadDone(0, 5, 2, 0.1),
            ReadDone(7, 0, 2, 0.1),
            ReadFailed(0, 5, 2, "no"),
            ReadFailed(-1, 0, 2, "no"),
            # Nobody told it to stop, and it had nothing to stop.
            ReadStopped(0, 0, 2, 1, 0.1),
            ReadStopped(0, 0, 9999, 1, 0.1),
            ReaderHello(99, 0, 1),
            ReaderHello(-1, 0, 1),
            # Only a reader itself says that it was replaced.
            ReaderHello(0, 1, 1),
        ]
        for lie in lies:
            liar.send(lie.encode())
        await_malformed(group, len(lies))
        assert group.directory.entry[0, 1] == ABSENT
        assert group.stats()[counters.RESIDENT_EXPERTS] == 1
        assert not group.stats().get(counters.READERS_REPLACED)
        liar.close()


def test_the_last_words_of_a_replaced_reader_are_not_believed() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=1, faults="hang:expert=0.1") as group:
        group.fetch(0, [0])
        group.ask(0, [1])
        group.children["reader-0"].kill()
        group.bury("reader-0")
        group.start_reader(0, incarnation=3, faults="delay:seconds=0.3")
        ghost = stranger(group, group.endpoints.readers, "ghost")
        deadline = time.monotonic() + 20
        while not group.stats().get(counters.READERS_REPLACED):
            assert time.monotonic() < deadline
        before = group.stats()[counters.READ_BYTES]
        for number in range(1, 10):
            ghost.send(ReadDone(0, 0, number, 0.1).encode())
            ghost.send(ReaderHello(0, 0, 1).encode())
        assert group.stats()[counters.READ_BYTES] == before
        group.await_resident(0, [1])
        assert group.stats()[counters.MALFORMED_MESSAGES] == 0, "late, but not wrong"
        ghost.close()


def test_frames_of_any_size_are_survived() -> None:
    with ExpertGroup(MINI, slots=SLOTS) as group:
        raw = stranger(group, group.endpoints.experts, "raw")
        raw.send(Demand(1, 0, [1]).encode() + bytes(70_000))
        raw.send(Hint(1, 0, [1], 1, [2], []).encode())
        await_malformed(group, 2)
        huge = stranger(group, group.endpoints.experts, "huge")
        huge.send(bytes(17 << 20))
        group.fetch(0, [1, 2])
        assert group.stats()[counters.MALFORMED_MESSAGES] == 2
        raw.close()
        huge.close()


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_trace_says_who_read_what_for_whom(tmp_path: Path) -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=2, latency=0.05) as group:
        step = teach(group, 1, [5, 6])
        for name in group.children:
            group.control.send(TraceStart(str(tmp_path / name)), to=name)
            # Answered after it on the same socket: the trace is on.
            group.control.send(StatsRequest(0), to=name)
        for _ in group.children:
            group.hear(StatsReply)
        group.hint(step, 0, [], 1, [5, 6])
        while not group.stats().get(counters.PREDICTED_ISSUED):
            pass
        # Whether its second piece pays, too, before the routing is the scheduler's affair.
        group.hint(step, 1, [5], -1, [])
        group.await_resident(1, [5])
        group.fetch(2, [3, 4])
        for name in group.children:
            group.control.send(TraceStop(), to=name)
        for _ in group.children:
            group.hear(TraceStopped)
    reads = [e for n in (0, 1) for e in events(tmp_path / f"reader-{n}") if e["ph"] == "X"]
    asked = {(e["name"], e["args"]["layer"], e["args"]["expert"]) for e in reads}
    # And whether the second guess pays after the first took its time.
    asked -= {("read predicted", 1, 6), ("read urgent", 1, 5)}
    assert asked == {("read predicted", 1, 5), ("read urgent", 2, 3), ("read urgent", 2, 4)}
    assert all(e["args"]["bytes"] > 0 and e["dur"] >= 50_000 for e in reads)
    service = events(tmp_path / "experts")
    (demand,) = [e for e in service if e["ph"] == "X"]
    assert demand["name"] == "demand" and demand["args"] == {"layer": 2, "experts": 2}
    urgent = [e for e in reads if e["args"]["layer"] == 2]
    assert demand["ts"] <= min(e["ts"] for e in urgent)
    assert demand["ts"] + demand["dur"] >= max(e["ts"] + e["dur"] for e in urgent)
    counted = {e["name"] for e in service if e["ph"] == "C"}
    assert counted == {"queue_depth", "resident_experts", "read bytes/s"}


def test_an_emulated_disk_takes_its_time_and_readers_share_it() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=2, bandwidth=200_000.0) as group:
        begin = time.monotonic()
        group.fetch(0, [0, 1, 2, 3])
        seconds = time.monotonic() - begin
        nbytes = sum(p.length for e in range(4) for p in group.slices.experts[0][e].pieces)
    assert seconds > 0.9 * nbytes / 200_000.0


def test_a_stuck_reader_is_reported_again_while_nobody_replaces_it() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=1, faults="hang", order_timeout=0.3) as group:
        group.ask(0, [1])
        first, second = group.hear(ReaderStuck), group.hear(ReaderStuck)
        assert (first.reader, second.reader) == (0, 0) and second.seconds > first.seconds + 0.25


def test_a_reader_that_stops_answering_for_a_while_only_delays() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=1) as group:
        os.kill(group.children["reader-0"].pid, signal.SIGSTOP)
        group.ask(0, [1, 2])
        assert group.stats()[counters.RESIDENT_EXPERTS] == 0
        os.kill(group.children["reader-0"].pid, signal.SIGCONT)
        group.await_resident(0, [1, 2])
        assert group.stats()[counters.READS_URGENT] == 2
