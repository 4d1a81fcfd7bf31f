"""Symptom: a group that takes more memory than it was given, on a checkpoint that would not fit.

The checkpoint is larger than all the group may take: the dense weights, the arena and 1 GiB more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.memory import dense_bytes
from launch.synth.command import synthesize
from protocol.config import ModelConfig
from protocol.messages import Finished
from tests.ipc.running_group import RunningGroup

GIB = 1 << 30
CHANGES = {"num_hidden_layers": 4, "n_routed_experts": 288, "moe_intermediate_size": 5120}
SLOTS = 24


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "large"
    synthesize(directory, "mini", CHANGES, seed=0)
    yield directory
    for shard in directory.glob("*.safetensors"):
        shard.unlink()


def proportional_bytes(pid: int) -> int:
    """A process's memory, what it shares with others counted in shares (PSS)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/{pid}/smaps_rollup has no Pss")


def test_the_group_takes_more_than_dense_weights_arena_and_a_gibibyte(large: Path) -> None:
    # What tests before this one have left in this process is not the group's.
    before = proportional_bytes(os.getpid())
    with RunningGroup(large, slots=SLOTS, readers=2) as group:
        arena = SLOTS * group.group.plan.slot_bytes
        limit = dense_bytes(ModelConfig.load(large)) + arena + GIB
        assert sum(file.stat().st_size for file in large.iterdir()) > limit
        processes = [os.getpid(), *group.group.pids.values()]
        peak = 0
        events = group.open([0, *range(5, 200)], 40, temperature=1.0)
        event = group.run(anext(events))
        while not isinstance(event, Finished):
            peak = max(peak, sum(map(proportional_bytes, processes)) - before)
            event = group.run(anext(events))
        assert event.reason == "length"
        assert group.stats()["experts"]["read_bytes"] > 2 * arena
        assert arena < peak < limit
