"""Symptoms: experts read through a mapping, at a thirtieth of the disk's speed and into the page
cache; a compute process that opens what only readers should."""

from __future__ import annotations

import os
from pathlib import Path

from tests.ipc.running_group import RunningGroup


def mapped_shards(pid: int) -> set[str]:
    """Checkpoint files in the address space of a process."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.endswith(".safetensors")}


def open_shards(pid: int) -> set[str]:
    """Numbers of the checkpoint's shards that a process holds open."""
    names = [Path(os.readlink(path)).name for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {name.split("-")[1] for name in names if name.endswith(".safetensors")}


def test_a_process_maps_a_shard_or_compute_reads_experts_itself() -> None:
    with RunningGroup(readers=2) as group:
        group.tokens([0, *range(5, 25)], 4)
        pids = group.group.pids
        assert {name: mapped_shards(pid) for name, pid in pids.items()} == {
            name: set() for name in pids
        }
        assert open_shards(pids["compute"]) == set() == open_shards(pids["experts"])
        # Layers 0 to 7 lie in shards 3 to 10, the engram tables in the last two.
        assert open_shards(pids["reader-0"]) == {f"{number:05d}" for number in range(3, 11)}
        assert open_shards(pids["engram"]) == {"00014", "00015"}
