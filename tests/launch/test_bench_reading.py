"""Symptoms: a benchmark that measures hits instead of reads, whose keys a script cannot find, that
lays a read's cost to the miss, or that waits for a process which has died."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from launch.bench import io, miss
from launch.bench.commands import io_command, ipc_command, miss_command
from launch.bench.expert_group import ExpertGroup
from launch.bench.expert_tier import experts_of
from launch.bench.miss import Demanded, fitted, least_waited_for
from launch.simulate.disk import DiskModel
from launch.simulate.replay import Machine, plain_slices
from protocol.errors import ProcessDied, ResourceError, UsageError
from protocol.layouts import ABSENT

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
    arguments = ["--demands", "20", "--layer-ms", "0.1", "--disk-bandwidth", "10MB", "--json"]
    result = CliRunner().invoke(miss_command, [str(MINI), "--readers", "1", *arguments])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["took_us"] > figures["disk_us"] > 0
    assert {"miss_us", "turn_us", "miss_us_error", "turn_us_error"} <= figures.keys()
    assert "0 of 30 demands" in result.stderr and "27 of 30 demands" in result.stderr


def miss_run(checkpoint: Path = MINI, layer_s: float = 0.0001) -> dict[str, object]:
    return miss.run(
        checkpoint,
        readers=1,
        piece_bytes=4 << 20,
        bandwidth=1e9,
        latency=0.0,
        layer_s=layer_s,
        demands=20,
    )


def test_bench_miss_refuses_what_hides_every_miss(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"computes for 250 ms while the disk takes .*--layer-ms"):
        miss_run(layer_s=1.0)
    config = json.loads((MINI / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"text_config": config["text_config"] | {"n_routed_experts": 14}})
    )
    with pytest.raises(UsageError, match="experts fit 12 slots all or nearly"):
        miss_run(tmp_path)
    result = CliRunner().invoke(
        miss_command, [str(MINI), "--disk-bandwidth", "1GB", "--demands", "19"]
    )
    assert result.exit_code == 2 and "19 is not in the range 20<=x" in result.output


def test_no_demand_is_timed_whose_reads_are_done_before_the_work_beside_them() -> None:
    """Two readers, experts of three pieces of 8.192 ms: two in turn for one expert, three for two,
    five for three."""
    disk = DiskModel(2e6, concurrency=2)
    machine = Machine(8, 2, 1, disk, plain_slices(1, 8, 3 * 8192, 8192), 0)
    assert least_waited_for(machine, 3, 0.016) == 1
    assert least_waited_for(machine, 3, 0.017) == 2
    assert least_waited_for(machine, 3, 0.040) == 3
    with pytest.raises(UsageError, match=r"42 ms while the disk takes 41 for 3 experts"):
        least_waited_for(machine, 3, 0.042)


class Sending:
    """A source and the clock beside it: sending takes 7 s, each expert 1, using it 30."""

    now = 0.0
    sent = 0

    def perf_counter(self) -> float:
        return self.now

    def look_up(self, layer: int, experts: range) -> list[int]:
        return [ABSENT for _ in experts]

    def fetch(self, layer: int, experts: list[int]) -> Iterator[int]:
        self.sent += 1
        self.now += 7

        def arriving() -> Iterator[int]:
            for expert in experts:
                self.now += 1
                yield expert
            self.now += 30

        return arriving()

    def release(self) -> None:
        pass


def test_neither_sending_nor_using_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Sending()
    monkeypatch.setattr(miss, "time", source)
    monkeypatch.setattr(miss, "experts_of", lambda group, device: source)
    config = SimpleNamespace(num_hidden_layers=2, n_routed_experts=9, num_experts_per_tok=4)
    timed = miss._timed(SimpleNamespace(config=config), 0.0, 2, 20)
    assert source.sent == len(timed) == 20
    assert {len(demanded.experts) for demanded in timed} == {2, 3, 4}
    assert all(demanded.seconds == len(demanded.experts) for demanded in timed)


@pytest.mark.parametrize(
    ("beyond", "miss_us", "turn_us"),
    [
        ((2300, 2600), 2000, 300),
        # Turns that seem to give time back, and a miss that seems to.
        ((1800, 1600), 1700, 0),
        ((100, 800), 0, 340),
    ],
)
def test_what_misses_and_turns_take_is_told_apart(
    beyond: tuple[int, int], miss_us: float, turn_us: float
) -> None:
    """Two readers, experts of three pieces: one reader turns once for one expert, twice for two.
    `beyond` the disk's time are microseconds of one and of two experts."""
    disk = DiskModel(2e6, concurrency=2)
    machine = Machine(8, 2, 1, disk, plain_slices(1, 8, 3 * 8192, 8192), 0)
    timed = [
        Demanded(0, [0, 1][:count], (count + 1) * 0.008192 + beyond[count - 1] / 1e6)
        for count in (1, 2) * 4
    ]
    figures = fitted(timed, machine)
    assert figures["miss_us"] == pytest.approx(miss_us, abs=1)
    assert figures["turn_us"] == pytest.approx(turn_us, abs=1)
    # As many turns in each: they cannot be told from the miss.
    figures = fitted(timed[::2], machine)
    assert figures["miss_us"] == pytest.approx(beyond[0], abs=1)
    assert figures["turn_us"] == 0 and figures["turn_us_error"] is None


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


def test_a_benchmark_advises_no_option_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    with (
        pytest.raises(ResourceError, match="give a writable one in XDG_RUNTIME_DIR"),
        ExpertGroup(MINI, slots=24),
    ):
        raise AssertionError("it cannot have started")
