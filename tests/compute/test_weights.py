"""Loading dense weights: what is refused, and what is never read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from compute import weights
from compute.formats import dequantize_fp8_weight
from compute.weights import ModelWeights, dense_bytes
from protocol.errors import CheckpointError
from protocol.shards import Shards, TensorEntry
from protocol.tensor_table import kind_of
from tests.golden import harness
from tests.golden.cases import MINI
from tests.golden.harness import config

CPU = torch.device("cpu")


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    """A copy of the mini checkpoint that a test may damage."""
    for path in MINI.iterdir():
        shutil.copy(path, tmp_path)
    return Shards.open(tmp_path, config())


def put(entry: TensorEntry, at: int, value: int) -> None:
    with entry.path.open("r+b") as file:
        file.seek(entry.offset + at)
        file.write(bytes([value]))


def refused(shards: Shards) -> str:
    with pytest.raises(CheckpointError) as raised:
        ModelWeights.load(shards, CPU)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_nan_scale_is_refused_with_file_tensor_and_place(shards: Shards) -> None:
    entry = shards.tensors["layers.4.attn.wo_b.scale"]
    put(entry, 3, 255)
    message = refused(shards)
    assert str(entry.path) in message and entry.name in message and "[1, 1]" in message


def test_a_nan_code_is_refused_with_file_and_tensor(shards: Shards) -> None:
    entry = shards.tensors["layers.3.engram.wkv.weight"]
    put(entry, 1000, 0xFF)
    message = refused(shards)
    assert str(entry.path) in message and entry.name in message


def test_the_largest_scale_is_not_mistaken_for_nan(shards: Shards) -> None:
    put(shards.tensors["layers.4.attn.wo_b.scale"], 3, 254)
    ModelWeights.load(shards, CPU)


def test_a_file_that_shrank_after_the_check_is_refused_by_name(shards: Shards) -> None:
    entry = shards.tensors["head.weight"]
    os.truncate(entry.path, entry.offset + entry.nbytes // 2)
    message = refused(shards)
    assert str(entry.path) in message and "cut short" in message


def test_a_file_that_vanished_is_refused_by_name(shards: Shards) -> None:
    path = shards.tensors["embed.weight"].path
    path.unlink()
    assert str(path) in refused(shards)


def test_routed_experts_engram_tables_and_drafts_are_never_read(shards: Shards) -> None:
    """Overwrite all of their bytes with NaN scales and codes: nothing changes."""
    for name, entry in shards.tensors.items():
        if kind_of(name) != "dense":
            with entry.path.open("r+b") as file:
                file.seek(entry.offset)
                file.write(b"\xff" * entry.nbytes)
    loaded = ModelWeights.load(shards, CPU)
    assert torch.equal(loaded.head, harness.weights().head)


def test_memory_is_known_before_anything_is_read() -> None:
    assert dense_bytes(config(), CPU) == harness.weights().nbytes


def test_pieces_are_joined_without_a_seam(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 5000)
    loaded, whole = ModelWeights.load(shards, CPU), harness.weights()
    assert torch.equal(loaded.embed, whole.embed) and torch.equal(loaded.head, whole.head)
    for got, want in zip(loaded.layers, whole.layers, strict=True):
        assert torch.equal(got.attention.wq_b.values, want.attention.wq_b.values)
        assert torch.equal(got.attention.wq_a_wkv.values, want.attention.wq_a_wkv.values)


def test_stacked_weights_are_the_two_matrices_one_above_the_other() -> None:
    parts = []
    for name in ("wq_a", "wkv"):
        raw = []
        for part in ("weight", "scale"):
            entry = harness.shards().tensors[f"layers.5.attn.{name}.{part}"]
            data = entry.path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
            raw.append(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(entry.shape))
        parts.append(dequantize_fp8_weight(*raw))
    held = harness.weights().layers[5].attention.wq_a_wkv.values
    assert torch.equal(held, torch.cat(parts))


def test_weights_kept_as_stored_have_the_values_of_dequantized_ones() -> None:
    kept, whole = ModelWeights.load(harness.shards(), CPU, stored=True), harness.weights()
    assert kept.nbytes < whole.nbytes / 2
    for got, want in zip(kept.layers, whole.layers, strict=True):
        for name in ("wq_a_wkv", "wq_b", "wo_a", "wo_b"):
            weight = getattr(got.attention, name)
            codes, scales = weight.stored
            assert torch.equal(weight.values, getattr(want.attention, name).values)
            exact = dequantize_fp8_weight(codes, scales)
            assert torch.equal(dequantize_fp8_weight(codes, scales, torch.bfloat16).float(), exact)
        assert torch.equal(got.gate.weight.float(), want.gate.weight)
    assert kept.head.dtype == torch.bfloat16 and torch.equal(kept.head.float(), whole.head)


def test_progress_counts_every_layer(shards: Shards) -> None:
    seen: list[tuple[int, int]] = []
    ModelWeights.load(shards, CPU, lambda done, layers: seen.append((done, layers)))
    assert seen == [(done, 8) for done in range(1, 9)]
