"""Ways to damage a copy of the mini checkpoint, each as a download, a disk or an editor does it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from protocol.config import ModelConfig
from protocol.shards import DTYPE_BITS, INDEX_NAME
from protocol.tensor_table import expected_tensors

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
Json = dict[str, Any]


def copy_of_mini(directory: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(MINI, directory / "checkpoint"))


@contextmanager
def edited(path: Path) -> Iterator[Json]:
    """The JSON object in `path`, written back at the end."""
    value = json.loads(path.read_text(encoding="utf-8"))
    yield value
    path.write_text(json.dumps(value), encoding="utf-8")


@contextmanager
def config(checkpoint: Path) -> Iterator[Json]:
    """The text_config of config.json, written back at the end."""
    with edited(checkpoint / "config.json") as whole:
        yield whole["text_config"]


@contextmanager
def index(checkpoint: Path) -> Iterator[Json]:
    """The index's weight_map, written back at the end."""
    with edited(checkpoint / INDEX_NAME) as whole:
        yield whole["weight_map"]


def shard_of(checkpoint: Path, tensor: str) -> Path:
    """The shard that holds `tensor`."""
    whole = json.loads((checkpoint / INDEX_NAME).read_text(encoding="utf-8"))
    return checkpoint / whole["weight_map"][tensor]


def rewrite_header(path: Path, change: Callable[[Json], None]) -> None:
    """Change a shard's header; the tensors' bytes stay."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def set_byte(checkpoint: Path, tensor: str, value: int) -> None:
    """Overwrite the first byte of a tensor."""
    path = shard_of(checkpoint, tensor)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    begin = 8 + length + json.loads(raw[8 : 8 + length])[tensor]["data_offsets"][0]
    set_byte_at(path, begin, value)


def set_byte_at(path: Path, offset: int, value: int) -> None:
    """Overwrite one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([value]))


def sparse_checkpoint(directory: Path, **changes: int) -> Path:
    """A sound checkpoint of the mini shape with these changes to text_config, whose shards are all
    holes: it takes no room on disk, whatever sizes it claims."""
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(MINI / name, checkpoint / name)
    with config(checkpoint) as text:
        text |= changes
    weight_map: dict[str, str] = {}
    for group, items in groupby(
        expected_tensors(ModelConfig.load(checkpoint)).items(), lambda item: item[1].group
    ):
        header, end = {}, 0
        for name, spec in items:
            begin, end = end, end + math.prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8
            header[name] = {
                "dtype": spec.dtype,
                "shape": spec.shape,
                "data_offsets": [begin, end],
            }
        raw = json.dumps(header).encode()
        path = checkpoint / f"{group}.safetensors"
        path.write_bytes(len(raw).to_bytes(8, "little") + raw)
        with path.open("r+b") as file:
            file.truncate(8 + len(raw) + end)
        weight_map |= dict.fromkeys(header, path.name)
    (checkpoint / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return checkpoint
