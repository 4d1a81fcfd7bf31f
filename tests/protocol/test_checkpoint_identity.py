"""Symptoms: a copy taken for another checkpoint, other weights for the same, a wait without end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import CheckpointError
from protocol.identity import PREDICTOR_NAME, checkpoint_identity
from tests.faults import damage
from tests.golden.cases import MINI


def test_a_copy_is_the_same_and_other_weights_are_not(tmp_path: Path) -> None:
    copy = damage.copy_of_mini(tmp_path)
    shard = next(copy.glob("*.safetensors"))
    os.utime(shard, (1, 1))
    (copy / PREDICTOR_NAME).write_bytes(b"made from the shards")
    assert checkpoint_identity(copy) == checkpoint_identity(MINI)
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xa5")
    assert checkpoint_identity(copy) != checkpoint_identity(MINI)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["config.json", "stray.safetensors"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    copy = damage.copy_of_mini(tmp_path)
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read \(not a file\)"):
        checkpoint_identity(copy)
