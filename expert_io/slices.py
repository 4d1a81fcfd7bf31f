"""Where an expert's bytes lie in the shards, and where they go in a slot.

Owns the slice map: six tensors an expert, found in the shard headers, merged into as few file
ranges as the layout allows (two in the release: three weights, three scales), widened to the
alignment that O_DIRECT needs, packed one after the other into a slot, and cut into pieces. Takes
any layout: six single tensors in six shards work too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.config import ModelConfig
from protocol.layouts import PLACES, Words, align_up
from protocol.shards import Shards, TensorEntry
from protocol.tensor_table import expert_tensor

# The strictest logical block size in use; O_DIRECT wants offsets, lengths and memory at multiples.
BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Slice:
    """One read of an expert: `length` bytes at `offset` of file number `file` to `slot_offset` of
    its slot, all multiples of BLOCK except where `needed` says that the file may end earlier.
    `scales` are (begin, end) offsets in the slot that hold e8m0 scales; `number` counts an expert's
    reads from 0."""

    file: int
    offset: int
    length: int
    needed: int
    slot_offset: int
    scales: tuple[tuple[int, int], ...]
    number: int


@dataclass(frozen=True, slots=True)
class ExpertSlices:
    """An expert's reads, and `place`: where each tensor of PLACES begins in the slot."""

    pieces: tuple[Slice, ...]
    place: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class SliceMap:
    """Every routed expert's slices. `slot_bytes` fits the largest expert with its slack."""

    files: tuple[Path, ...]
    experts: tuple[tuple[ExpertSlices, ...], ...]
    slot_bytes: int

    @classmethod
    def build(cls, config: ModelConfig, shards: Shards, piece_bytes: int) -> SliceMap:
        """From checked headers; pieces hold at most `piece_bytes`, rounded up to a block."""
        numbers: dict[Path, int] = {}
        piece = align_up(max(piece_bytes, BLOCK), BLOCK)
        layers = []
        for layer in range(config.num_hidden_layers):
            experts = []
            for expert in range(config.n_routed_experts):
                tensors = _tensors(shards, layer, expert)
                for tensor in tensors:
                    numbers.setdefault(tensor.path, len(numbers))
                experts.append(_expert_slices(tensors, numbers, piece))
            layers.append(tuple(experts))
        slot_bytes = max(e.nbytes for row in layers for e in row)
        return cls(tuple(numbers), tuple(layers), slot_bytes)

    @property
    def most_pieces(self) -> int:
        """Reads of the expert with the most."""
        return max(len(expert.pieces) for row in self.experts for expert in row)

    def pieces(self) -> Words:
        """How many reads every expert takes, int64 [layers, experts], for the directory."""
        return np.array([[len(expert.pieces) for expert in row] for row in self.experts], np.int64)

    def places(self) -> Words:
        """`place` of every expert, int64 [layers, experts, 6], for the directory."""
        return np.array([[expert.place for expert in row] for row in self.experts], np.int64)


def _tensors(shards: Shards, layer: int, expert: int) -> list[TensorEntry]:
    names = (place.split(".") for place in PLACES)
    return [shards.tensors[expert_tensor(layer, expert, *name)] for name in names]


def _expert_slices(
    tensors: Sequence[TensorEntry], numbers: dict[Path, int], piece: int
) -> ExpertSlices:
    ordered = sorted(tensors, key=lambda t: (numbers[t.path], t.offset))
    place: dict[str, int] = {}
    pieces: list[Slice] = []
    position = 0
    for run in _runs(ordered):
        begin = run[0].offset // BLOCK * BLOCK
        end = run[-1].offset + run[-1].nbytes
        scales = []
        for tensor in run:
            place[tensor.name] = position + tensor.offset - begin
            if tensor.dtype == "F8_E8M0":
                scales.append((place[tensor.name], place[tensor.name] + tensor.nbytes))
        pieces.extend(cut(numbers[run[0].path], begin, end, position, scales, piece, len(pieces)))
        position += align_up(end - begin, BLOCK)
    return ExpertSlices(tuple(pieces), tuple(place[tensor.name] for tensor in tensors), position)


def _runs(ordered: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """Group tensors whose blocks touch: one read takes them all and reads no block twice."""
    runs: list[list[TensorEntry]] = []
    for tensor in ordered:
        if runs and runs[-1][-1].path == tensor.path:
            last = runs[-1][-1]
            if tensor.offset // BLOCK * BLOCK <= align_up(last.offset + last.nbytes, BLOCK):
                runs[-1].append(tensor)
                continue
        runs.append([tensor])
    return runs


def cut(
    file: int,
    begin: int,
    end: int,
    position: int,
    scales: list[tuple[int, int]],
    piece: int,
    first: int = 0,
) -> list[Slice]:
    """Cut the file range [begin, end) that goes to `position` of the slot, numbered from
    `first` on."""
    pieces = []
    for number, offset in enumerate(range(begin, end, piece), first):
        needed = min(piece, end - offset)
        at = position + offset - begin
        inside = [(max(low, at), min(high, at + needed)) for low, high in scales]
        pieces.append(
            Slice(
                file,
                offset,
                align_up(needed, BLOCK),
                needed,
                at,
                tuple(pair for pair in inside if pair[0] < pair[1]),
                number,
            )
        )
    return pieces
