"""A packed copy of the experts: one file, layer after layer, each expert one aligned range.

Owns the format. A block with what the file is, a table with each expert's state, then the experts,
`stride` bytes apart, their six tensors in the order of `protocol.layouts.PLACES`. Promises: a file
that is not finished, or was made from another checkpoint, is refused; the bytes in a slot are laid
out as the header says.

    0       magic, version, length of the JSON; JSON: identity, layers, experts, stride, tensors
    4096    u64 for each expert: CRC-32 of its `stride` bytes, with WRITTEN set once they are there
    ...     the experts, from the next block on
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from expert_io.slices import BLOCK, ExpertSlices, SliceMap, cut
from protocol.config import ModelConfig, require_file
from protocol.errors import CheckpointError
from protocol.identity import checkpoint_identity
from protocol.layouts import PLACES, align_up
from protocol.shards import Shards
from protocol.tensor_table import expert_tensor

MAGIC = b"hrexpert"
VERSION = 1
WRITTEN = 1 << 32
# Kernels take a tensor at multiples of 16; a cache line costs no more.
TENSOR_ALIGNMENT = 64
_PREFIX = struct.Struct("<8sII")

Table = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PackHeader:
    """`tensors` are (offset in the expert, bytes) in the order of PLACES; `identity` is that of the
    checkpoint the pack was made from (`protocol.identity`)."""

    identity: str
    layers: int
    experts: int
    stride: int
    tensors: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, shards: Shards, identity: str) -> PackHeader:
        """What a pack of this checkpoint has to be."""
        config = shards.config
        position, tensors = 0, []
        for place in PLACES:
            nbytes = shards.tensors[expert_tensor(0, 0, *place.split("."))].nbytes
            tensors.append((position, nbytes))
            position = align_up(position + nbytes, TENSOR_ALIGNMENT)
        stride = align_up(position, BLOCK)
        layers, experts = config.num_hidden_layers, config.n_routed_experts
        return cls(identity, layers, experts, stride, tuple(tensors))

    @property
    def begin(self) -> int:
        """Offset of the first expert."""
        return align_up(BLOCK + 8 * self.layers * self.experts, BLOCK)

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return self.begin + self.layers * self.experts * self.stride

    def offset(self, layer: int, expert: int) -> int:
        """Where an expert begins in the file."""
        return self.begin + (layer * self.experts + expert) * self.stride

    def packed(self) -> bytes:
        """The first block."""
        text = json.dumps(asdict(self)).encode()
        return (_PREFIX.pack(MAGIC, VERSION, len(text)) + text).ljust(BLOCK, b"\0")


def read_table(path: Path, header: PackHeader, file: BinaryIO) -> Table:
    """The state of every expert, uint64 [layers, experts], of a file that must be this pack.

    Raises CheckpointError for another file, a pack of another checkpoint, or a wrong size.
    """
    block = file.read(BLOCK)
    if block[: len(MAGIC)] != MAGIC:
        raise CheckpointError(f"{path}: is no pack of experts; make one with headrace pack")
    if block != header.packed():
        raise CheckpointError(
            f"{path}: was packed from another checkpoint or another version of this one; remove it "
            "and pack again"
        )
    count = header.layers * header.experts
    raw = file.read(8 * count)
    size = file.seek(0, 2)
    if size != header.nbytes:
        raise CheckpointError(f"{path}: has {size} bytes, expected {header.nbytes}; pack again")
    return np.frombuffer(raw, "<u8").reshape(header.layers, header.experts).copy()


def read_pack(path: Path, header: PackHeader) -> Table:
    """The table of the pack at `path`; raises CheckpointError as `read_table` does."""
    require_file(path)
    try:
        with path.open("rb") as file:
            return read_table(path, header, file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def packed_slices(path: Path, shards: Shards, identity: str, piece_bytes: int) -> SliceMap:
    """Where every expert lies in the pack at `path`. Raises CheckpointError for one that is not
    whole or not of the checkpoint `shards` with this `identity`."""
    header = PackHeader.of(shards, identity)
    table = read_pack(path, header)
    if missing := int((table < WRITTEN).sum()):
        raise CheckpointError(f"{path}: lacks {missing} experts; finish it with headrace pack")
    piece = align_up(max(piece_bytes, BLOCK), BLOCK)
    scales = [
        (offset, offset + nbytes)
        for place, (offset, nbytes) in zip(PLACES, header.tensors, strict=True)
        if place.endswith(".scale")
    ]
    place = tuple(offset for offset, _ in header.tensors)
    needed = header.tensors[-1][0] + header.tensors[-1][1]
    layers = []
    for layer in range(header.layers):
        row = []
        for expert in range(header.experts):
            begin = header.offset(layer, expert)
            pieces = cut(0, begin, begin + needed, 0, scales, piece)
            row.append(ExpertSlices(tuple(pieces), place, header.stride))
        layers.append(tuple(row))
    return SliceMap((path,), tuple(layers), header.stride)


def expert_slices(
    directory: Path, config: ModelConfig, pack: Path | None, piece_bytes: int
) -> SliceMap:
    """Where the experts of the checkpoint in `directory` are read from: its shards, or `pack`."""
    shards = Shards.open(directory, config)
    if pack is None:
        return SliceMap.build(config, shards, piece_bytes)
    return packed_slices(pack, shards, checkpoint_identity(directory), piece_bytes)
