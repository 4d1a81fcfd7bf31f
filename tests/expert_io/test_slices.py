"""Symptoms: a tensor found at the wrong place, a block read twice, a layout that is refused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from expert_io.slices import BLOCK, SliceMap
from protocol.config import ModelConfig
from protocol.layouts import PLACES
from protocol.shards import Shards, TensorEntry
from protocol.tensor_table import expert_tensor

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
CONFIG = dataclasses.replace(
    ModelConfig.load(MINI), num_hidden_layers=2, n_routed_experts=5, hidden_size=64
)
SIZES = {"weight": 7001, "scale": 433}
Layout = Callable[[int, int], Sequence[tuple[str, str]]]  # (layer, expert) -> (place, file)


def checkpoint(layout: Layout, gap: int = 0, start: int = 1234) -> Shards:
    """Made-up headers: tensors follow each other in the order and the file that `layout` names."""
    ends: dict[str, int] = {}
    tensors: dict[str, TensorEntry] = {}
    for layer in range(CONFIG.num_hidden_layers):
        for expert in range(CONFIG.n_routed_experts):
            for place, file in layout(layer, expert):
                matrix, part = place.split(".")
                name = expert_tensor(layer, expert, matrix, part)
                dtype = "I8" if part == "weight" else "F8_E8M0"
                offset = ends.get(file, start) + gap
                size = SIZES[part]
                tensors[name] = TensorEntry(name, Path(file), dtype, (size,), offset, size)
                ends[file] = offset + size
    return Shards(Path(), CONFIG, tensors, ())


def released(layer: int, expert: int) -> list[tuple[str, str]]:
    return [(place, f"layer{layer}") for place in PLACES]


def scales_elsewhere(layer: int, expert: int) -> list[tuple[str, str]]:
    return [(p, f"layer{layer}" if p.endswith("weight") else "scales") for p in PLACES]


def six_files(layer: int, expert: int) -> list[tuple[str, str]]:
    return [(place, f"file{n}") for n, place in enumerate(PLACES)]


def shuffled(layer: int, expert: int) -> list[tuple[str, str]]:
    chance = random.Random(layer * 100 + expert)
    order = list(PLACES)
    chance.shuffle(order)
    return [(place, chance.choice(["a", "b"])) for place in order]


LAYOUTS: dict[str, tuple[Layout, int]] = {
    "released": (released, 0),
    "scales in another shard": (scales_elsewhere, 0),
    "six files": (six_files, 0),
    "shuffled over two files": (shuffled, 0),
    "far apart": (released, 9000),
}


def read_into_slot(slices: SliceMap, shards: Shards, layer: int, expert: int) -> bytearray:
    """What readers would make of the slot, with every file's bytes made of name and offset."""
    slot = bytearray(b"\xee" * slices.slot_bytes)
    for piece in slices.experts[layer][expert].pieces:
        path = slices.files[piece.file]
        end = max(t.offset + t.nbytes for t in shards.tensors.values() if t.path == path)
        data = content(path)[piece.offset : min(piece.offset + piece.length, end)]
        assert len(data) >= piece.needed, "more is needed than the file has"
        slot[piece.slot_offset : piece.slot_offset + len(data)] = data
    return slot


@lru_cache
def content(path: Path) -> bytes:
    return random.Random(path.name).randbytes(1 << 20)


@pytest.mark.parametrize("piece_bytes", [1, BLOCK, 3 * BLOCK, 1 << 20])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_of_any_layout_comes_to_its_place(name: str, piece_bytes: int) -> None:
    layout, gap = LAYOUTS[name]
    shards = checkpoint(layout, gap)
    slices = SliceMap.build(CONFIG, shards, piece_bytes)
    places = slices.places()
    for layer in range(CONFIG.num_hidden_layers):
        for expert in range(CONFIG.n_routed_experts):
            slot = read_into_slot(slices, shards, layer, expert)
            for index, place in enumerate(PLACES):
                tensor = shards.tensors[expert_tensor(layer, expert, *place.split("."))]
                begin = int(places[layer, expert, index])
                expected = content(tensor.path)[tensor.offset : tensor.offset + tensor.nbytes]
                assert slot[begin : begin + tensor.nbytes] == expected, (layer, expert, place)


@pytest.mark.parametrize("piece_bytes", [1, BLOCK, 3 * BLOCK, 1 << 20])
@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_are_aligned_bounded_and_apart(name: str, piece_bytes: int) -> None:
    layout, gap = LAYOUTS[name]
    slices = SliceMap.build(CONFIG, checkpoint(layout, gap), piece_bytes)
    for expert in (e for row in slices.experts for e in row):
        taken: set[tuple[int, int]] = set()
        filled: set[int] = set()
        for piece in expert.pieces:
            assert piece.offset % BLOCK == piece.length % BLOCK == piece.slot_offset % BLOCK == 0
            assert piece.needed <= piece.length <= max(BLOCK, piece_bytes)
            assert piece.slot_offset + piece.length <= slices.slot_bytes
            blocks = {(piece.file, b) for b in blocks_of(piece.offset, piece.length)}
            assert not blocks & taken, "read twice"
            taken |= blocks
            place = set(blocks_of(piece.slot_offset, piece.length))
            assert not place & filled, "written twice"
            filled |= place


def blocks_of(begin: int, length: int) -> range:
    return range(begin // BLOCK, (begin + length) // BLOCK)


@pytest.mark.parametrize(
    ("name", "reads"),
    [("released", 1), ("scales in another shard", 2), ("six files", 6), ("far apart", 6)],
)
def test_neighbours_are_read_as_one(name: str, reads: int) -> None:
    layout, gap = LAYOUTS[name]
    slices = SliceMap.build(CONFIG, checkpoint(layout, gap), 1 << 20)
    assert {len(e.pieces) for row in slices.experts for e in row} == {reads}


@pytest.mark.parametrize("piece_bytes", [1, BLOCK, 1 << 20])
def test_every_scale_byte_is_checked_exactly_once(piece_bytes: int) -> None:
    shards = checkpoint(shuffled)
    slices = SliceMap.build(CONFIG, shards, piece_bytes)
    places = slices.places()
    for layer, row in enumerate(slices.experts):
        for number, expert in enumerate(row):
            checked = [
                at
                for piece in expert.pieces
                for begin, end in piece.scales
                for at in range(begin, end)
            ]
            expected = set()
            for index, place in enumerate(PLACES):
                if place.endswith("scale"):
                    begin = int(places[layer, number, index])
                    expected |= set(range(begin, begin + SIZES["scale"]))
            assert len(checked) == len(expected) and set(checked) == expected
            for piece in expert.pieces:
                for begin, end in piece.scales:
                    assert piece.slot_offset <= begin < end <= piece.slot_offset + piece.length


def test_the_slot_fits_the_expert_with_the_most_slack() -> None:
    slices = SliceMap.build(CONFIG, checkpoint(shuffled), BLOCK)
    assert slices.slot_bytes == max(e.nbytes for row in slices.experts for e in row)
    assert slices.slot_bytes % BLOCK == 0


def test_the_mini_checkpoint_is_found_where_its_headers_say() -> None:
    config = ModelConfig.load(MINI)
    shards = Shards.open(MINI, config)
    slices = SliceMap.build(config, shards, 8192)
    places = slices.places()
    assert places.shape == (config.num_hidden_layers, config.n_routed_experts, len(PLACES))
    expert = slices.experts[3][5]
    slot = np.zeros(slices.slot_bytes, np.uint8)
    for piece in expert.pieces:
        with slices.files[piece.file].open("rb") as file:
            file.seek(piece.offset)
            data = np.frombuffer(file.read(piece.length), np.uint8)
        slot[piece.slot_offset : piece.slot_offset + len(data)] = data
    for index, place in enumerate(PLACES):
        tensor = shards.tensors[expert_tensor(3, 5, *place.split("."))]
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            expected = file.read(tensor.nbytes)
        begin = int(places[3, 5, index])
        assert slot[begin : begin + tensor.nbytes].tobytes() == expected
