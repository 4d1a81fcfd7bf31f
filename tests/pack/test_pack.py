"""`headrace pack`: the same bytes, gone on with where it was, refused when stale."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from expert_io.packed import (
    WRITTEN,
    PackHeader,
    expert_slices,
    packed_slices,
    read_pack,
    read_table,
)
from expert_io.slices import BLOCK, SliceMap
from launch.bench.expert_group import ExpertGroup
from launch.cli import cli
from launch.pack import writer
from protocol.config import ModelConfig
from protocol.errors import CheckpointError, ReadError
from protocol.identity import checkpoint_identity
from protocol.layouts import PLACES, entry_slot
from protocol.shards import Shards
from tests.ipc.running_group import MINI

CONFIG = ModelConfig.load(MINI)
SHARDS = Shards.open(MINI, CONFIG)
IDENTITY = checkpoint_identity(MINI)


def pack(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["pack", *map(str, arguments)])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pack") / "experts.pack"
    result = pack(MINI, path)
    assert result.exit_code == 0, result.output
    return path


def tensors(slices: SliceMap, layer: int, expert: int) -> list[bytes]:
    """An expert's six tensors, read as a reader reads them."""
    of = slices.experts[layer][expert]
    slot = bytearray(of.nbytes)
    for piece in of.pieces:
        with slices.files[piece.file].open("rb") as file:
            file.seek(piece.offset)
            content = file.read(piece.length)
        assert len(content) >= piece.needed
        slot[piece.slot_offset : piece.slot_offset + len(content)] = content
    sizes = [nbytes for _, nbytes in PackHeader.of(SHARDS, IDENTITY).tensors]
    return [bytes(slot[at : at + n]) for at, n in zip(of.place, sizes, strict=True)]


@pytest.mark.parametrize("piece_bytes", [BLOCK, 4 << 20])
def test_every_expert_has_the_shards_bytes_in_one_aligned_range(
    packed: Path, piece_bytes: int
) -> None:
    of_pack = packed_slices(packed, SHARDS, IDENTITY, piece_bytes)
    of_shards = SliceMap.build(CONFIG, SHARDS, piece_bytes)
    previous = 0
    for layer in range(CONFIG.num_hidden_layers):
        for expert in range(CONFIG.n_routed_experts):
            assert tensors(of_pack, layer, expert) == tensors(of_shards, layer, expert)
            pieces = of_pack.experts[layer][expert].pieces
            assert len(pieces) == 1 or piece_bytes == BLOCK
            assert pieces[0].offset > previous and pieces[0].offset % BLOCK == 0
            ends = [piece.offset + piece.length for piece in pieces]
            assert [piece.offset for piece in pieces[1:]] == ends[:-1]
            previous = pieces[-1].offset
    # The scales that a reader checks are the scales.
    for name, (low, nbytes) in zip(PLACES, PackHeader.of(SHARDS, IDENTITY).tensors, strict=True):
        covered = sum(
            max(0, min(high, low + nbytes) - max(begin, low))
            for piece in of_pack.experts[1][2].pieces
            for begin, high in piece.scales
        )
        assert covered == (nbytes if name.endswith("scale") else 0)


def test_real_readers_land_the_same_experts_from_the_pack(packed: Path) -> None:
    of_shards = SliceMap.build(CONFIG, SHARDS, 4 << 20)
    with ExpertGroup(MINI, slots=12, readers=1, pack=packed) as group:
        group.fetch(3, [0, 5, 7])
        for expert in (0, 5, 7):
            slot = entry_slot(int(group.directory.entry[3, expert]))
            data = group.arena.data[slot]
            expected = tensors(of_shards, 3, expert)
            for at, content in zip(group.directory.place[3, expert], expected, strict=True):
                assert bytes(data[at : at + len(content)]) == content


def test_a_run_that_was_ended_goes_on_and_copies_no_layer_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "experts.pack"
    copied: list[int] = []
    write_layer = writer._write_layer

    def until_the_power_fails(shards: Shards, header: PackHeader, layer: int, output: int):  # type: ignore[no-untyped-def]
        if layer == 2 and len(copied) == 2:
            raise KeyboardInterrupt
        copied.append(layer)
        return write_layer(shards, header, layer, output)

    monkeypatch.setattr(writer, "_write_layer", until_the_power_fails)
    with pytest.raises(KeyboardInterrupt):
        writer.write_pack(SHARDS, path, IDENTITY, lambda count: None)
    assert not path.exists() and copied == [0, 1]
    # A layer that was copied but not recorded is copied again.
    copied.append(-1)
    assert writer.write_pack(SHARDS, path, IDENTITY, lambda count: None)
    assert copied == [0, 1, -1, *range(2, CONFIG.num_hidden_layers)]
    assert (read_pack(path, PackHeader.of(SHARDS, IDENTITY)) >= WRITTEN).all()
    assert os.listdir(tmp_path) == ["experts.pack"]
    assert pack(MINI, path, "--verify").exit_code == 0


def test_a_pack_that_is_there_is_an_error(packed: Path) -> None:
    before = packed.read_bytes()
    result = pack(MINI, packed)
    assert result.exit_code == 0 and packed.read_bytes() == before


def test_what_is_no_file_is_an_internal_error_or_waited_for(packed: Path, tmp_path: Path) -> None:
    assert "name a file" in str(pack(MINI, tmp_path).exception)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for arguments in ((MINI, pipe), (MINI, pipe, "--verify")):
        assert "not a file" in str(pack(*arguments).exception)


def test_what_the_disk_changed_is_found(packed: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(packed, tmp_path / "p"))
    header = PackHeader.of(SHARDS, IDENTITY)
    with path.open("r+b") as file:
        file.seek(header.offset(4, 9) + 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
        file.seek(0)
        table = read_table(path, header, file)
    writer.verify_layer(path, header, 3, table)
    with pytest.raises(ReadError, match="layer 4 expert 9"):
        writer.verify_layer(path, header, 4, table)
    assert isinstance(pack(MINI, path, "--verify").exception, ReadError)


def test_a_stale_foreign_unfinished_or_cut_pack_is_refused(packed: Path, tmp_path: Path) -> None:
    def refused(path: Path, why: str, identity: str = IDENTITY) -> None:
        with pytest.raises(CheckpointError, match=why):
            packed_slices(path, SHARDS, identity, 4 << 20)

    refused(packed, "another checkpoint", "0" * 32)
    refused(tmp_path / "missing", "cannot be read")
    (tmp_path / "text").write_text("hello")
    refused(tmp_path / "text", "is no pack")
    content = packed.read_bytes()
    (tmp_path / "cut").write_bytes(content[:-BLOCK])
    refused(tmp_path / "cut", "expected")
    header = PackHeader.of(SHARDS, IDENTITY)
    table = np.frombuffer(content[BLOCK : BLOCK + 8 * 128], "<u8").copy()
    table[7] = 5
    (tmp_path / "open").write_bytes(content[:BLOCK] + table.tobytes() + content[BLOCK + 8 * 128 :])
    refused(tmp_path / "open", "lacks 1 experts")
    assert replace(header, identity="0" * 32).packed() != header.packed()
    # Packing over something else destroys nothing.
    result = pack(MINI, tmp_path / "text")
    assert isinstance(result.exception, CheckpointError)
    assert (tmp_path / "text").read_text() == "hello"
    # A checkpoint whose bytes changed under the same names and sizes.
    other = Path(shutil.copytree(MINI, tmp_path / "other"))
    shard = max(other.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    changed = bytearray(shard.read_bytes())
    changed[len(changed) // 2 :] = bytes(byte ^ 1 for byte in changed[len(changed) // 2 :])
    shard.write_bytes(changed)
    with pytest.raises(CheckpointError, match="another checkpoint"):
        expert_slices(other, ModelConfig.load(other), packed, 4 << 20)
