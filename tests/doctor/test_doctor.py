"""Advice: what follows from a machine's figures, and that every warning says how to mend it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launch.check import Findings
from launch.doctor import command
from launch.doctor.advice import Advice, Estimate, advise
from launch.doctor.machine import Gpu, Machine, look
from launch.doctor.measure import DiskSpeed, MemorySpeed, measure_disk
from protocol.errors import CheckpointError
from tests.golden.cases import MINI

GIB = 1 << 30
NEEDS = Findings(
    layers=40,
    experts_per_layer=384,
    experts_per_token=6,
    expert_bytes=18_800_640,
    file_bytes={"routed experts": 290 * 10**9},
    token_classes=99_092,
    token_map_sha256="c60a",
    dense_memory_cpu=34 * GIB,
    least_cache_slots=252,
    least_cache_bytes=252 * 18_800_640,
    full_cache_bytes=15_360 * 18_800_640,
    reads_per_expert=2.0,
    warnings=(),
)
MACHINE = Machine(
    system="Linux",
    torch="2.13.0",
    cores=32,
    cpus=32.0,
    memory=256 * GIB,
    available=240 * GIB,
    memlock=None,
    gpu=Gpu("H200", 140 * GIB, 138 * GIB),
    gpu_without_torch=False,
    file_system="ext4",
    rotating=False,
)
DISK = DiskSpeed(True, {1: 2e9, 2: 4e9, 4: 6e9, 8: 6.1e9}, 60_000.0, 9e9)
MEMORY = MemorySpeed(4.2e12, 50e9)


def advice(
    needs: Findings = NEEDS,
    machine: Machine = MACHINE,
    disk: DiskSpeed = DISK,
    memory: MemorySpeed = MEMORY,
) -> Advice:
    return advise(Path("/ckpt"), needs, machine, disk, memory, rows_per_token=48)


def test_a_good_machine_has_nothing_to_mend() -> None:
    found = advice()
    assert found.warnings == () and found.device == "cuda"
    assert found.options == {"cache": "190.4GiB", "readers": "4"}
    assert 0.70 < found.cache_share < 0.71


def test_the_estimate_is_its_bytes_over_the_measured_rates() -> None:
    worst = advice().worst
    used = 240 * 18_800_640
    assert worst.found == advice().cache_share
    assert worst.disk_ms == pytest.approx(1000 * used * (1 - worst.found) / 6e9)
    assert worst.engram_ms == pytest.approx(0.8)
    assert worst.link_ms == pytest.approx(1000 * used / 50e9)
    whole = worst.disk_ms + worst.engram_ms + worst.link_ms + worst.memory_ms
    assert worst.tokens_per_s == pytest.approx(1000 / whole)
    assert worst.binds == "reading experts from disk"
    assert advice().likely.tokens_per_s > worst.tokens_per_s


def test_with_every_expert_in_memory_the_disk_costs_nothing() -> None:
    found = advice(machine=dataclasses.replace(MACHINE, memory=600 * GIB, available=590 * GIB))
    assert found.cache_bytes == NEEDS.full_cache_bytes and found.likely.disk_ms == 0
    assert found.likely.binds == "copying experts to the GPU"


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"machine": {"memlock": 64 << 10}}, "RLIMIT_MEMLOCK is 64.0 KiB", "ulimit -l unlimited"),
    ({"machine": {"available": 5 * GIB}}, "smallest cache", "docker run --memory="),
    ({"machine": {"available": 60 * GIB}}, "control group", "systemd-run"),
    (
        {"machine": {"gpu": None, "gpu_without_torch": True}},
        "torch 2.13.0 does not use it",
        "pip install torch --index-url",
    ),
    (
        {"machine": {"gpu": Gpu("small", 8 * GIB, 7 * GIB)}},
        "of the GPU's memory 7.0 GiB are free",
        "--device cpu",
    ),
    ({"machine": {"cpus": 2.0}}, "2 of 32 CPUs", "docker run --cpus"),
    ({"machine": {"file_system": "nfs4"}}, "network file system (nfs4)", "rsync -a /ckpt/"),
    ({"disk": {"direct": False}}, "does not take O_DIRECT", "--buffered"),
    (
        {"machine": {"rotating": True}, "disk": {"rows_per_s": 120.0}},
        "spinning disk",
        "rsync -a /ckpt/",
    ),
    ({"needs": {"warnings": ("a duplicate tensor",)}}, "a duplicate", "headrace check /ckpt"),
]


@pytest.mark.parametrize(("changes", "what", "mend"), CASES)
def test_each_trouble_is_named_with_what_mends_it(
    changes: dict[str, dict[str, Any]], what: str, mend: str
) -> None:
    parts: dict[str, Any] = {"needs": NEEDS, "machine": MACHINE, "disk": DISK}
    for name, change in changes.items():
        parts[name] = dataclasses.replace(parts[name], **change)
    found = [warning for warning in advice(**parts).warnings if what in warning.what]
    assert len(found) == 1, advice(**parts).warnings
    assert mend in found[0].mend


def test_a_virtual_disk_that_says_it_spins_is_judged_by_its_reads() -> None:
    assert advice(machine=dataclasses.replace(MACHINE, rotating=True)).warnings == ()


def test_readers_are_as_many_as_still_help() -> None:
    assert DISK.best_readers == 4 and DISK.bandwidth == 6e9
    assert dataclasses.replace(DISK, by_readers={1: 2e9, 2: 2.05e9}).best_readers == 1


def test_this_machine_is_looked_at_and_its_disk_is_measured() -> None:
    machine = look(MINI)
    assert 0 < machine.available <= machine.memory and 0 < machine.cpus <= machine.cores
    disk = measure_disk(sorted(MINI.glob("*.safetensors")), 24_576, seconds=0.05)
    assert all(rate > 0 for rate in disk.by_readers.values()) and disk.rows_per_s > 0


def test_a_disk_too_slow_for_one_read_in_the_time_has_no_speed() -> None:
    disk = measure_disk(sorted(MINI.glob("*.safetensors")), 24_576, seconds=0.0)
    assert all(rate > 0 for rate in disk.by_readers.values()) and disk.rows_per_s > 0


def test_json_is_for_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure_disk", lambda files, size: DISK)
    result = CliRunner().invoke(command.doctor_command, [str(MINI), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["likely"]["tokens_per_s"] > 0 and found["disk"]["best_readers"] == 4
    shown = CliRunner().invoke(command.doctor_command, [str(MINI)])
    assert shown.exit_code == 0 and "headrace serve" in shown.stdout


def test_a_broken_checkpoint_is_its_own_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(command.doctor_command, [str(tmp_path)])
    assert isinstance(result.exception, CheckpointError)


def test_a_speed_is_written_in_plain_digits() -> None:
    for milliseconds, said in ((1.163, "860"), (77.0, "13"), (240.0, "4.2"), (9000.0, "0.11")):
        assert command._speed(Estimate(1.0, milliseconds, 0.0, 0.0, 0.0)).startswith(
            f"about {said} tokens"
        )
