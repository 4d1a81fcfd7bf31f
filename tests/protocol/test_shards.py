"""Headers, index and config tell one story, or the file that does not is named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.config import ModelConfig
from protocol.errors import CheckpointError
from protocol.shards import INDEX_NAME, MAX_HEADER_BYTES, Shards
from protocol.tensor_table import expected_tensors
from tests.faults import damage
from tests.faults.damage import Json

EXPERT = "layers.3.ffn.experts.2.w1.weight"
SCALE = "layers.3.ffn.experts.2.w1.scale"


def _open(checkpoint: Path) -> Shards:
    return Shards.open(checkpoint, ModelConfig.load(checkpoint))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return damage.copy_of_mini(tmp_path)


def _refused(checkpoint: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _open(checkpoint)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_every_tensor_is_found_where_its_bytes_are(checkpoint: Path) -> None:
    shards = _open(checkpoint)
    assert shards.warnings == ()
    for name, spec in expected_tensors(shards.config).items():
        entry = shards.tensors[name]
        assert (entry.dtype, entry.shape) == (spec.dtype, spec.shape)
        assert entry.offset + entry.nbytes <= entry.path.stat().st_size


@pytest.mark.parametrize("missing", [1, 100, 5000])
def test_a_shard_cut_short_is_not_read_as_zeros(checkpoint: Path, missing: int) -> None:
    path = damage.shard_of(checkpoint, EXPERT)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - missing)
    _refused(checkpoint, str(path), f"has {size - missing} bytes, expected {size}", "cut short")


@pytest.mark.parametrize("size", [0, 5, 8])
def test_a_shard_shorter_than_its_header_is_named(checkpoint: Path, size: int) -> None:
    path = damage.shard_of(checkpoint, EXPERT)
    with path.open("r+b") as file:
        file.truncate(size)
    _refused(checkpoint, str(path))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, MAX_HEADER_BYTES + 1, 10_000_000])
def test_a_header_longer_than_the_file_takes_no_memory(checkpoint: Path, length: int) -> None:
    path = damage.shard_of(checkpoint, EXPERT)
    with path.open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
    _refused(checkpoint, str(path), f"header length {length}")


def test_a_header_that_is_not_json_is_named(checkpoint: Path) -> None:
    path = damage.shard_of(checkpoint, EXPERT)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x00")
    _refused(checkpoint, str(path), "header is not JSON")


def _set(key: str, value: object) -> Callable[[Json], None]:
    return lambda header: header[EXPERT].__setitem__(key, value)


@pytest.mark.parametrize(
    "change, complaint",
    [
        (_set("dtype", "U8"), "is U8, expected I8"),
        (_set("dtype", "F13"), "without a known dtype"),
        (_set("dtype", ["I8"]), "without a known dtype"),
        (_set("shape", [32, 128]), "has shape [32, 128], expected [64, 64]"),
        (_set("shape", [64, 65]), "expected 4160 bytes"),
        (_set("shape", [-64, -64]), "has data_offsets"),
        (_set("shape", [10**4000, 10**4000]), "has data_offsets"),
        (_set("shape", [2] * 20_000), "has data_offsets"),
        (_set("shape", None), "without a known dtype"),
        (_set("data_offsets", [0, 1 << 40]), "expected 4096 bytes"),
        (_set("data_offsets", [1 << 40, (1 << 40) + 4096]), "cut short"),
        (_set("data_offsets", [4096, 0]), "has data_offsets"),
        (_set("data_offsets", [-4096, 0]), "has data_offsets"),
        (_set("data_offsets", [0]), "without a known dtype"),
        (_set("data_offsets", ["0", "4096"]), "has data_offsets"),
        (lambda header: header.__setitem__(EXPERT, 5), "without a known dtype"),
        (lambda header: header.pop(EXPERT), "is missing, though"),
    ],
)
def test_a_wrong_header_entry_is_named(
    checkpoint: Path, change: Callable[[Json], None], complaint: str
) -> None:
    path = damage.shard_of(checkpoint, EXPERT)
    damage.rewrite_header(path, change)
    _refused(checkpoint, str(path), EXPERT, complaint)


def test_overlapping_tensors_are_refused(checkpoint: Path) -> None:
    path = damage.shard_of(checkpoint, EXPERT)

    def overlap(header: Json) -> None:
        other = "layers.3.ffn.experts.2.w3.weight"
        header[other]["data_offsets"] = header[EXPERT]["data_offsets"]

    damage.rewrite_header(path, overlap)
    _refused(checkpoint, str(path), "overlaps")


def test_an_index_that_names_a_shard_that_is_not_there(checkpoint: Path) -> None:
    path = damage.shard_of(checkpoint, EXPERT)
    path.unlink()
    _refused(checkpoint, str(path), "missing, though model.safetensors.index.json names it")


def test_a_scale_absent_from_the_index_never_defaults_to_one(checkpoint: Path) -> None:
    with damage.index(checkpoint) as weight_map:
        del weight_map[SCALE]
    _refused(checkpoint, INDEX_NAME, SCALE)


def test_an_index_entry_for_a_shard_that_lacks_the_tensor(checkpoint: Path) -> None:
    other = damage.shard_of(checkpoint, "layers.4.attn_norm.weight")
    with damage.index(checkpoint) as weight_map:
        weight_map[SCALE] = other.name
    _refused(checkpoint, str(other), SCALE, "is missing")


def test_a_tensor_the_config_needs_and_no_file_has(checkpoint: Path) -> None:
    path = damage.shard_of(checkpoint, SCALE)
    damage.rewrite_header(path, lambda header: header.pop(SCALE))
    with damage.index(checkpoint) as weight_map:
        del weight_map[SCALE]
    _refused(checkpoint, SCALE, "is missing; expected F8_E8M0")


def test_a_stale_second_copy_is_reported_and_not_used(checkpoint: Path) -> None:
    owner = damage.shard_of(checkpoint, "norm.weight")
    stale = damage.shard_of(checkpoint, EXPERT)

    def add(header: Json) -> None:
        size = stale.stat().st_size - 8 - int.from_bytes(stale.read_bytes()[:8], "little")
        header["norm.weight"] = {
            "dtype": "BF16",
            "shape": [128],
            "data_offsets": [size, size + 256],
        }

    damage.rewrite_header(stale, add)
    with stale.open("ab") as file:
        file.write(b"\xff" * 256)
    shards = _open(checkpoint)
    assert shards.tensors["norm.weight"].path == owner
    assert len(shards.warnings) == 1 and stale.name in shards.warnings[0]


@pytest.mark.parametrize(
    "shard", ["../escape.safetensors", "/etc/passwd", "", 5, None, "a/b", "a\0b", "\ud800"]
)
def test_an_index_cannot_name_a_file_elsewhere(checkpoint: Path, shard: object) -> None:
    with damage.index(checkpoint) as weight_map:
        weight_map[EXPERT] = shard
    _refused(checkpoint, INDEX_NAME, EXPERT, "expected a file name")


@pytest.mark.parametrize("weight_map", [None, [], {}, "all"])
def test_an_index_without_a_weight_map_is_refused(checkpoint: Path, weight_map: object) -> None:
    with damage.edited(checkpoint / INDEX_NAME) as whole:
        whole["weight_map"] = weight_map
    _refused(checkpoint, INDEX_NAME, "weight_map is missing or empty")


def test_a_missing_index_is_named(checkpoint: Path) -> None:
    (checkpoint / INDEX_NAME).unlink()
    _refused(checkpoint, INDEX_NAME, "missing")


def test_a_shard_that_is_a_directory_is_named(checkpoint: Path) -> None:
    path = damage.shard_of(checkpoint, EXPERT)
    path.unlink()
    path.mkdir()
    _refused(checkpoint, str(path), "cannot be read")


def test_random_damage_to_a_header_is_refused_or_harmless(checkpoint: Path) -> None:
    draw = random.Random(11)
    path = damage.shard_of(checkpoint, EXPERT)
    sound = path.read_bytes()
    length = int.from_bytes(sound[:8], "little")
    for _ in range(100):
        raw = bytearray(sound)
        for _ in range(draw.randint(1, 3)):
            raw[draw.randrange(8 + length)] = draw.randrange(256)
        path.write_bytes(raw)
        try:
            _open(checkpoint)
        except CheckpointError as error:
            assert "\n" not in str(error)
    shutil.rmtree(checkpoint)
