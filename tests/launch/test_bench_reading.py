"""Symptoms: a benchmark that measures hits instead of reads, whose keys a script cannot find, that
lays a read's cost to the miss, or that waits for a process which has died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from launch.bench import io
from launch.bench.commands import io_command, ipc_command, miss_command
from launch.bench.expert_group import ExpertGroup
from launch.bench.expert_tier import experts_of
from launch.bench.miss import Demanded, fitted
from launch.simulate.disk import DiskModel
from launch.simulate.replay import Machine, plain_slices
from protocol.errors import ProcessDied, UsageError

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"


def test_bench_io_reads_the_same_bytes_both_ways() -> None:
    arguments = [str(MINI), "--readers", "1", "--rounds", "2", "--round", "256KiB", "--json"]
    result = CliRunner().invoke(io_command, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout[result.stdout.index("{") :])
    assert {"pool_gib_s", "preadv_gib_s", "ratio"} <= figures.keys()
    assert figures["pool_gib_s"] > 0 and figures["preadv_gib_s"] > 0 and figures["ratio"] > 0
    assert figures["rounds"] == 2 and figures["readers"] == 1


def test_bench_io_refuses_a_checkpoint_that_fits_the_cache() -> None:
    with pytest.raises(UsageError, match=r"two rounds of .* do not fit; give fewer --readers"):
        io.run(MINI, readers=32, rounds=1, round_bytes=1 << 30, piece_bytes=4096, direct=True)


def test_bench_ipc_times_hits_without_and_misses_with_messages() -> None:
    arguments = [str(MINI), "--hits", "200", "--misses", "5", "--json"]
    result = CliRunner().invoke(ipc_command, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert 0 < figures["hit_us_p50"] <= figures["hit_us_p99"]
    assert 0 < figures["miss_overhead_us_p50"] <= figures["miss_overhead_us_p99"]
    assert figures["hit_us_p50"] < figures["miss_overhead_us_p50"]
    assert figures["misses"] == 5


def test_bench_miss_times_demands_of_a_slowed_disk() -> None:
    arguments = ["--demands", "12", "--layer-ms", "0.1", "--disk-bandwidth", "10MB", "--json"]
    result = CliRunner().invoke(miss_command, [str(MINI), "--readers", "1", *arguments])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["took_us"] > figures["disk_us"] > 0
    assert {"miss_us", "turn_us", "miss_us_error", "turn_us_error"} <= figures.keys()


def test_what_misses_and_turns_take_is_told_apart() -> None:
    """Two readers, experts of three pieces: one reader turns once for one expert, twice for two."""
    disk = DiskModel(2e6, concurrency=2)
    machine = Machine(8, 2, 1, disk, plain_slices(1, 8, 3 * 8192, 8192), 0)
    timed = [
        Demanded(0, [0, 1][:count], turns * (0.008192 + 0.0003) + 0.008192 + 0.002)
        for count, turns in ((1, 1), (2, 2)) * 4
    ]
    figures = fitted(timed, machine)
    assert figures["miss_us"] == pytest.approx(2000, abs=1)
    assert figures["turn_us"] == pytest.approx(300, abs=1)


@pytest.mark.parametrize("killed", ["reader-0", "experts"])
def test_a_wait_ends_when_a_process_does(killed: str) -> None:
    """At a byte a second nothing comes by itself."""
    with ExpertGroup(MINI, slots=24, readers=1, bandwidth=1.0) as group:
        arriving = experts_of(group, torch.device("cpu")).fetch(0, [1])
        group.children[killed].kill()
        with pytest.raises(ProcessDied, match=f"{killed} ended: killed by SIGKILL"):
            next(arriving)
        assert killed not in group.children
    with ExpertGroup(MINI, slots=24, readers=1, bandwidth=1.0) as group:
        group.children[killed].kill()
        with pytest.raises(ProcessDied, match=f"{killed} ended: killed by SIGKILL"):
            group.fetch(0, [1])
