"""Symptom: deterministic wrong logits with a small cache only, because a slot is refilled while it
is read. A compute process of its own reads slots slowly, out of an arena far too small, while
readers are slow, fail to answer and die."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launch.bench.expert_group import ExpertGroup
from protocol import counters
from tests.ipc.slot_reader import Work

ROOT = Path(__file__).parents[2]
MINI = ROOT / "tests" / "golden" / "data" / "mini"
# Four picks of each of two layers, out of twelve experts. Without a reserve a miss takes the slot
# of what was just evicted, which compute may be reading.
SLOTS = 6
# Everybody looks for messages without sleeping, also where they stand before they have come.
ALWAYS_S = 3600.0
SLOW = "delay:seconds=0.004:jitter=1:every=2"


def start(group: ExpertGroup, **work: Any) -> subprocess.Popen[str]:
    """A SlotReader in compute's place."""
    group.compute.close()
    descriptors = (group.arena.fd, group.directory.fd, group.progress.fd)
    orders = Work(group.endpoints.experts, str(MINI), *descriptors, **work)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ipc.slot_reader", json.dumps(asdict(orders))],
        pass_fds=descriptors,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def finish(reader: subprocess.Popen[str]) -> dict[str, int]:
    """What it did; fails with its words where it saw a wrong byte."""
    out, words = reader.communicate(timeout=100)
    assert reader.returncode == 0, words or "experts did not come"
    figures: dict[str, int] = json.loads(out)
    return figures


@pytest.mark.parametrize(
    ("seed", "reserve", "busy_poll"), [(1, 0, 0.0), (2, 1, 0.0), (5, 0, ALWAYS_S), (6, 1, ALWAYS_S)]
)
def test_no_slot_is_rewritten_while_compute_reads_it(
    seed: int, reserve: int, busy_poll: float
) -> None:
    with ExpertGroup(
        MINI,
        slots=SLOTS,
        readers=2,
        reserve=reserve,
        piece_bytes=8192,
        faults=SLOW,
        busy_poll=busy_poll,
    ) as group:
        figures = finish(start(group, steps=50, seed=seed))
        stats = group.stats()
    assert figures["checked"] == 50 * 2 * 4
    assert figures["hits"] > 30 and figures["misses"] > 60
    assert figures["announced_twice"] == 0
    assert stats[counters.EVICTIONS] > 60


def test_the_stress_sees_a_compute_that_lets_go_too_early() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=2, reserve=0, piece_bytes=8192) as group:
        reader = start(group, steps=300, seed=1, lets_go_early=True)
        _, words = reader.communicate(timeout=100)
        assert reader.returncode == 1 and words.startswith("slot ")


@pytest.mark.parametrize("busy_poll", [0.0, ALWAYS_S])
def test_readers_that_die_in_the_middle_cost_nothing_but_time(busy_poll: float) -> None:
    with ExpertGroup(
        MINI,
        slots=SLOTS,
        readers=2,
        reserve=1,
        piece_bytes=8192,
        faults=SLOW,
        busy_poll=busy_poll,
    ) as group:
        reader = start(group, steps=50, seed=3)
        incarnations = [0, 0]
        victim = 0
        for _ in range(4):
            before = read_bytes(group)
            deadline = time.monotonic() + 20
            # Somewhere in its next reads, wherever that is.
            while read_bytes(group) < before + 300_000:
                assert time.monotonic() < deadline and reader.poll() is None
            name = f"reader-{victim}"
            group.children[name].kill()
            group.bury(name)
            incarnations[victim] += 1
            group.start_reader(victim, incarnations[victim])
            victim = 1 - victim
        figures = finish(reader)
        stats = group.stats()
    assert figures["checked"] == 50 * 2 * 4 and figures["announced_twice"] == 0
    assert stats[counters.READERS_REPLACED] >= 3, "the last one may not have said hello"


def read_bytes(group: ExpertGroup) -> float:
    return group.stats().get(counters.READ_BYTES, 0.0)


@pytest.mark.parametrize("busy_poll", [0.0, ALWAYS_S])
def test_every_order_is_answered_exactly_once(busy_poll: float) -> None:
    """What was read is what was asked for: no piece twice, none left out."""
    with ExpertGroup(
        MINI,
        slots=SLOTS,
        readers=4,
        piece_bytes=4096,
        predicted_in_flight=0,
        faults=SLOW,
        busy_poll=busy_poll,
    ) as group:
        finish(start(group, steps=20, seed=4))
        stats = group.stats()
        nbytes = {sum(p.needed for p in e.pieces) for e in group.slices.experts[0]}
        begun = stats[counters.READS_URGENT]
    # Reads of abandoned or unneeded experts do not exist here, so bytes are whole experts.
    assert min(nbytes) * begun <= stats[counters.READ_BYTES] <= max(nbytes) * begun
