"""A service that looks takes a demand out of shared memory, once, and survives what is none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.bench.expert_group import ExpertGroup
from protocol import counters
from protocol.messages import Demand, Landed
from tests.ipc.running_group import PATIENCE_S

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
ALWAYS_S = 3600.0


@pytest.fixture
def group() -> Iterator[ExpertGroup]:
    """All of them look without sleeping, having had a first demand."""
    with ExpertGroup(MINI, slots=30, readers=1, busy_poll=ALWAYS_S) as running:
        running.fetch(0, [0])
        yield running


def answered(group: ExpertGroup) -> list[Landed]:
    """What has been answered up to now, seen by a demand that comes behind all others."""
    group.demands += 1
    group.compute.send(Demand(group.demands, 0, [0]))
    found = []
    while (received := group.compute.receive(PATIENCE_S)) is not None:
        assert isinstance(received[1], Landed)
        if received[1].demand == group.demands:
            return found
        found.append(received[1])
    raise AssertionError("a demand was not answered")


def test_a_demand_is_read_before_its_message_has_come_and_not_again_when_it_has(
    group: ExpertGroup,
) -> None:
    answered(group)
    group.demands += 1
    demand = Demand(group.demands, 2, [3])
    group.early_demands.put(demand.encode())
    group.await_resident(2, [3])
    answer = Landed(demand.demand, [3])
    group.compute.send(demand)
    assert answered(group) in ([], [answer]), "waiting for the directory takes answers in, too"
    # Sent again it is heard, as compute may ask after what it waits for.
    group.compute.send(demand)
    assert answered(group) == [answer]
    assert group.stats()[counters.READS_URGENT] == 2


def test_what_is_no_demand_is_counted_and_survived(group: ExpertGroup) -> None:
    for bad in (b"", bytes(100), Landed(1, [1]).encode(), Demand(1 << 40, 99, [1]).encode()):
        group.early_demands.put(bad)
    deadline = time.monotonic() + PATIENCE_S
    while group.stats()[counters.MALFORMED_MESSAGES] < 4:
        assert time.monotonic() < deadline
    group.fetch(1, [5, 6])
    assert group.stats()[counters.MALFORMED_MESSAGES] == 4
