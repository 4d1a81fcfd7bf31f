"""Ways to damage a copy of the mini checkpoint, each as a download, a disk or an editor does it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.shards import INDEX_NAME

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


def config(checkpoint: Path) -> Any:
    """Edit config.json's text_config."""

    @contextmanager
    def inner() -> Iterator[Json]:
        with edited(checkpoint / "config.json") as whole:
            yield whole["text_config"]

    return inner()


def index(checkpoint: Path) -> Any:
    """Edit the index's weight_map."""

    @contextmanager
    def inner() -> Iterator[Json]:
        with edited(checkpoint / INDEX_NAME) as whole:
            yield whole["weight_map"]

    return inner()


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
    path.write_bytes(raw[:begin] + bytes([value]) + raw[begin + 1 :])
