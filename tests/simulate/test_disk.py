"""Symptoms: simulated reads that are faster than the disk, or that never end."""

from __future__ import annotations

import math

import pytest

from launch.simulate.disk import Disk, DiskModel


def ends(model: DiskModel, reads: list[tuple[float, int]]) -> dict[int, float]:
    """When each of (start, bytes) is done."""
    disk, done = Disk(model), {}
    waiting = sorted((at, number, nbytes) for number, (at, nbytes) in enumerate(reads))
    while waiting or disk.next_end() < math.inf:
        if waiting and waiting[0][0] <= disk.next_end():
            disk.start(*waiting.pop(0))
        else:
            now = disk.next_end()
            done.update(dict.fromkeys(disk.finished(now), now))
    return done


def test_a_single_read_takes_latency_and_bandwidth() -> None:
    assert ends(DiskModel(1000.0, 0.5), [(1.0, 2000)])[0] == pytest.approx(3.5)


def test_reads_at_once_share_the_bandwidth() -> None:
    done = ends(DiskModel(1000.0), [(0.0, 1000), (0.0, 1000)])
    assert done == pytest.approx({0: 2.0, 1: 2.0})
    # The second begins halfway: the first has 500 bytes left, at half the speed.
    done = ends(DiskModel(1000.0), [(0.0, 1000), (0.5, 1000)])
    assert done == pytest.approx({0: 1.5, 1: 2.0})


def test_a_disk_that_wants_several_reads_gives_one_only_its_share() -> None:
    done = ends(DiskModel(1000.0, concurrency=4), [(0.0, 1000), (0.0, 1000)])
    assert done == pytest.approx({0: 4.0, 1: 4.0})


def test_the_disk_never_moves_more_than_its_bandwidth() -> None:
    reads = [(0.001 * n, 500 + 37 * n) for n in range(40)]
    done = ends(DiskModel(1000.0, 0.002, 1), reads)
    assert max(done.values()) >= sum(nbytes for _, nbytes in reads) / 1000.0
    assert max(done.values()) == pytest.approx(
        sum(nbytes for _, nbytes in reads) / 1000.0, rel=0.01
    )
