"""Writes a checkpoint in the released format, tensor by tensor, without holding it in memory.

Owns how files are laid out: one shard each for the embedding, every layer, the head, every draft
layer and every engram layer; inside a shard tensors lie by dtype, so that an expert's three weights
are neighbours and so are its three scales. A directory is whole or has no index, and no file in it
is cut short: one takes its name when it is complete.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from protocol.config import ModelConfig
from protocol.errors import HeadraceError, ResourceError
from protocol.shards import DTYPE_BITS, INDEX_NAME
from protocol.tensor_table import TensorSpec, expected_tensors

# The order in which safetensors' own writer lays dtypes out, by falling alignment.
_DTYPE_ORDER = ("F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")

# tensor(name, spec): the tensor's bytes in any number of pieces.
TensorBytes = Callable[[str, TensorSpec], Iterable[bytes]]


def nbytes(spec: TensorSpec) -> int:
    """Bytes a tensor takes in its shard."""
    return math.prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8


def checkpoint_bytes(config: ModelConfig) -> int:
    """Payload bytes of a whole checkpoint; headers add well under a per mille."""
    return sum(nbytes(spec) for spec in expected_tensors(config).values())


def write_checkpoint(
    directory: Path,
    config_json: Mapping[str, Any],
    documents: Mapping[str, str],
    tensor: TensorBytes,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Write config, shards, `documents` (further files by name) and, last of all, the index.

    `on_bytes(count)` is called as bytes are written. Raises ResourceError where a file cannot be
    written, HeadraceError where a tensor's pieces do not add up to its size.
    """
    config = ModelConfig.from_dict(config_json, directory / "config.json")
    index = directory / INDEX_NAME
    index.unlink(missing_ok=True)
    _write_text(directory / "config.json", json.dumps(config_json, indent=2) + "\n")
    for name, text in documents.items():
        _write_text(directory / name, text)
    groups = _by_shard(expected_tensors(config))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(groups, 1):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_shard(directory / shard, tensors, tensor, on_bytes)
        weight_map |= {name: shard for name, _ in tensors}
    total = checkpoint_bytes(config)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_text(index, json.dumps(document, indent=2) + "\n")


def _by_shard(table: Mapping[str, TensorSpec]) -> list[list[tuple[str, TensorSpec]]]:
    grouped = (list(items) for _, items in groupby(table.items(), key=lambda item: item[1].group))
    return [sorted(g, key=lambda item: _DTYPE_ORDER.index(item[1].dtype)) for g in grouped]


def _write_shard(
    path: Path,
    tensors: list[tuple[str, TensorSpec]],
    tensor: TensorBytes,
    on_bytes: Callable[[int], None],
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, spec in tensors:
        end = position + nbytes(spec)
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with _whole_or_absent(path) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, spec in tensors:
            written = 0
            for piece in tensor(name, spec):
                file.write(piece)
                written += len(piece)
                on_bytes(len(piece))
            if written != nbytes(spec):
                raise HeadraceError(f"{name}: {written} bytes were made, expected {nbytes(spec)}")


def _write_text(path: Path, text: str) -> None:
    with _whole_or_absent(path) as file:
        file.write(text.encode())


@contextmanager
def _whole_or_absent(path: Path) -> Iterator[BinaryIO]:
    """A file that is called `path` once it is complete, and is gone where it never gets there."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)
