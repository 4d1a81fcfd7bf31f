"""Writing a checkpoint in the released layout, streaming: no tensor is ever held whole.

Owns the shards' order, names and headers, the index, and that a directory is complete or absent:
everything is written beside it and renamed at the end. Which tensor goes into which shard comes
from `protocol.tensor_table`.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from protocol.config import ModelConfig
from protocol.errors import ResourceError, UsageError
from protocol.shards import DTYPE_BITS, INDEX_NAME
from protocol.tensor_table import TensorSpec, expected_tensors

# Any object whose memory is the bytes: bytes, a numpy array, ...
Chunk = Any
Tensor = tuple[str, Iterable[Chunk]]
ALIGNMENT = 8


def write_checkpoint(
    directory: Path,
    config_file: Mapping[str, Any],
    texts: Mapping[str, str],
    tensors: Iterable[Tensor],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Write `directory`: `config_file` as config.json, `texts` by file name (tokenizer.json, ...),
    and `tensors` in the order of `expected_tensors`, each as chunks of its stored bytes.

    `on_bytes` is told after each chunk. Raises CheckpointError for a config that does not hold
    together, UsageError where the directory exists, ResourceError where it does not fit the disk,
    ValueError for a tensor that is not the next expected or not of its size.
    """
    config = ModelConfig.from_dict(config_file, directory / "config.json")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory}: exists already; give a new directory or remove it")
    _check_room(directory, payload_bytes(config))
    partial = directory.with_name(f"{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_shards(partial, config, iter(tensors), on_bytes)
        _write_json(partial / "config.json", config_file)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        partial.replace(directory)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ResourceError(f"{directory}: cannot be written ({error.strerror})") from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def payload_bytes(config: ModelConfig) -> int:
    """Bytes of every tensor of a checkpoint with this config."""
    return sum(map(_nbytes, expected_tensors(config).values()))


def _nbytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8


def _check_room(directory: Path, needed: int) -> None:
    existing = next(parent for parent in directory.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ResourceError(
            f"{directory}: needs {needed / 2**30:.1f} GiB, {existing} has {free / 2**30:.1f} GiB "
            "free; choose fewer layers or experts, or another disk"
        )


def _write_shards(
    directory: Path, config: ModelConfig, tensors: Iterator[Tensor], on_bytes: Callable[[int], None]
) -> None:
    table = expected_tensors(config)
    groups = [
        dict(items) for _, items in itertools.groupby(table.items(), lambda item: item[1].group)
    ]
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_shard(directory / shard, group, tensors, on_bytes)
        weight_map.update(dict.fromkeys(group, shard))
    _write_json(
        directory / INDEX_NAME,
        {
            "metadata": {"total_size": payload_bytes(config)},
            "weight_map": dict(sorted(weight_map.items())),
        },
    )


def _write_shard(
    path: Path,
    group: Mapping[str, TensorSpec],
    tensors: Iterator[Tensor],
    on_bytes: Callable[[int], None],
) -> None:
    with path.open("wb") as file:
        file.write(_header(group))
        for name, spec in group.items():
            given, chunks = next(tensors, ("nothing", ()))
            if given != name:
                raise ValueError(f"{given} was given where {name} comes next")
            written = 0
            for chunk in chunks:
                block = memoryview(chunk).cast("B")
                file.write(block)
                written += len(block)
                on_bytes(len(block))
            if written != _nbytes(spec):
                raise ValueError(f"{name} has {written} bytes, expected {_nbytes(spec)}")


def _header(group: Mapping[str, TensorSpec]) -> bytes:
    entries, end = {}, 0
    for name, spec in group.items():
        begin, end = end, end + _nbytes(spec)
        entries[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
