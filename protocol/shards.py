"""Where every tensor of a checkpoint lies, read from the index and the shard headers and checked.

Owns the structural checks that need no knowledge of the model: every shard is as long as its header
says, no tensor overlaps another or leaves the file, and index and headers name the same tensors.
Only headers are read here, never a tensor's bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.config import ModelConfig, read_json_object, require_file
from protocol.errors import CheckpointError
from protocol.tensor_table import TensorSpec, expected_tensors

INDEX_NAME = "model.safetensors.index.json"
# The released 48 shards have headers under 1 MB; a larger figure is a damaged length field.
MAX_HEADER_BYTES = 64 << 20
# Of what a tensor's entry says, so that products of it stay numbers that can be shown.
_LARGEST, _MOST_DIMENSIONS = 1 << 50, 8
DTYPE_BITS = {
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "BF16": 16,
    "F16": 16,
    "F32": 32,
    "F64": 64,
    "I32": 32,
    "I64": 64,
    "BOOL": 8,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place: `nbytes` bytes from `offset` (absolute, in bytes) of `path`."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shards:
    """All tensors of a checkpoint by name; `warnings` are lines about what is odd and harmless."""

    directory: Path
    config: ModelConfig
    tensors: Mapping[str, TensorEntry]
    warnings: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path, config: ModelConfig) -> Shards:
        """Read index and headers of `directory` and check them against each other and `config`.

        Raises CheckpointError naming the file, the tensor and what was expected.
        """
        index_path = directory / INDEX_NAME
        weight_map = _weight_map(index_path)
        headers = {
            name: read_header(directory / name, index_path)
            for name in sorted(set(weight_map.values()))
        }
        tensors: dict[str, TensorEntry] = {}
        for name, shard in weight_map.items():
            entry = headers[shard].get(name)
            if entry is None:
                raise CheckpointError(
                    f"{directory / shard}: {name} is missing, though {INDEX_NAME} puts it there"
                )
            tensors[name] = entry
        warnings = tuple(_stray_tensors(headers, weight_map, index_path))
        for name, spec in expected_tensors(config).items():
            _check_entry(tensors.get(name), name, spec, index_path)
        return cls(directory, config, tensors, warnings)


def _weight_map(index_path: Path) -> dict[str, str]:
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map is missing or empty")
    for name, shard in weight_map.items():
        # A shard name is a file beside the index: anything else could name a file elsewhere.
        # Printable, since no path holds a zero byte or half a surrogate pair.
        named = isinstance(shard, str) and shard.isprintable() and Path(shard).name == shard
        if not named or not shard:
            raise CheckpointError(
                f"{index_path}: tensor {name} is in {shard!r}, expected a file name"
            )
    return weight_map


def _stray_tensors(
    headers: Mapping[str, Mapping[str, TensorEntry]],
    weight_map: Mapping[str, str],
    index_path: Path,
) -> list[str]:
    """Tensors in a shard that the index does not put there.

    A second copy of an indexed tensor is stale but harmless, so it is a warning; a tensor that no
    index entry names means that the index belongs to other files, so it is fatal.
    """
    warnings = []
    for shard, entries in headers.items():
        for name in entries:
            if name not in weight_map:
                raise CheckpointError(
                    f"{index_path}: tensor {name} of {shard} is not in the index; "
                    "fetch the index and the shards of one revision"
                )
            if weight_map[name] != shard:
                warnings.append(
                    f"{shard}: holds another copy of {name}; {weight_map[name]} is used"
                )
    return warnings


def _check_entry(entry: TensorEntry | None, name: str, spec: TensorSpec, index_path: Path) -> None:
    if entry is None:
        raise CheckpointError(
            f"{index_path}: tensor {name} is missing; expected {spec.dtype} {list(spec.shape)}"
        )
    if entry.dtype != spec.dtype:
        raise CheckpointError(f"{entry.path}: {name} is {entry.dtype}, expected {spec.dtype}")
    if entry.shape != spec.shape:
        raise CheckpointError(
            f"{entry.path}: {name} has shape {list(entry.shape)}, expected {list(spec.shape)}"
        )


def read_header(path: Path, index_path: Path | None = None) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, checked against its size. Raises CheckpointError."""
    require_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(
                    f"{path}: has {size} bytes, too short for a safetensors header"
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: header length {length} does not fit the file's {size} bytes; "
                    "fetch the file again"
                )
            raw = file.read(length)
    except FileNotFoundError:
        by = f", though {index_path.name} names it" if index_path else ""
        raise CheckpointError(f"{path}: missing{by}; fetch the file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header holds {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, item, 8 + length) for name, item in header.items()}
    _check_extents(path, list(entries.values()), 8 + length, size)
    return entries


def _entry(path: Path, name: str, item: Any, base: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        bits = DTYPE_BITS[dtype]
        numbers = (*shape, begin, end)
        sound = all(type(n) is int and 0 <= n <= _LARGEST for n in numbers) and end >= begin
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path}: {name} has a header entry without a known dtype, shape and data_offsets"
        ) from None
    if not sound or len(shape) > _MOST_DIMENSIONS:
        raise CheckpointError(
            f"{path}: {name} has data_offsets and a shape that no file could have; "
            "fetch the file again"
        )
    nbytes = math.prod(shape) * bits // 8
    if end - begin != nbytes:
        raise CheckpointError(
            f"{path}: {name} has data_offsets [{begin}, {end}], expected {nbytes} bytes "
            f"for {dtype} {list(shape)}"
        )
    return TensorEntry(name, path, dtype, shape, base + begin, nbytes)


def _check_extents(path: Path, entries: list[TensorEntry], base: int, size: int) -> None:
    position, previous = base, "the header"
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset < position:
            raise CheckpointError(f"{path}: {entry.name} overlaps {previous}; fetch the file again")
        position, previous = entry.offset + entry.nbytes, entry.name
    if position > size:
        raise CheckpointError(
            f"{path}: has {size} bytes, expected {position} with {previous}; it was cut short, "
            "fetch it again"
        )
