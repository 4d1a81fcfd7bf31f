"""What the bytes of a checkpoint's tensors hold: looks at all of them, where `check` reads headers.

Finds scales that are no numbers, and bits that turned on disk after the checkpoint was known to be
good: no check of structure sees those, they change the model's answers a little and nothing else.
A file of digests has one line a tensor, `DIGEST  NAME`, where DIGEST is BLAKE2b of 16 bytes in
hexadecimal. Every `on_bytes(count)` is called from several threads as bytes are read.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np

from launch.whole_file import whole_file
from protocol.errors import CheckpointError, ResourceError, UsageError
from protocol.shards import Shards, TensorEntry

NAN_SCALE = 255
BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 16
# Files read at once: a disk wants several reads in flight, and hashing runs outside Python's lock.
FILES_AT_ONCE = 4
_LINE = re.compile(rf"([0-9a-f]{{{2 * DIGEST_BYTES}}})  (\S+)")

OnBytes = Callable[[int], None]
T = TypeVar("T")


def scale_tensors(shards: Shards) -> list[TensorEntry]:
    """Every tensor of e8m0 scales."""
    return [entry for entry in shards.tensors.values() if entry.dtype == "F8_E8M0"]


def check_scales(shards: Shards, on_bytes: OnBytes) -> int:
    """Read every e8m0 scale; the number read. Raises CheckpointError naming a tensor with a NaN."""

    def check(entry: TensorEntry) -> None:
        for block in _blocks(entry, on_bytes):
            if np.frombuffer(block, np.uint8).max() == NAN_SCALE:
                raise CheckpointError(
                    f"{entry.path}: {entry.name} has a scale that is not a number (byte 255); "
                    "fetch the file again"
                )

    scales = scale_tensors(shards)
    _for_each(scales, check)
    return sum(math.prod(entry.shape) for entry in scales)


def record_digests(shards: Shards, path: Path, on_bytes: OnBytes) -> int:
    """Write `path`; the number of tensors. Raises CheckpointError, ResourceError."""
    try:
        # Opened before the work, which takes minutes.
        with whole_file(path) as file:
            digests = _digests(shards, on_bytes)
            file.writelines(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written ({error.strerror})") from None
    return len(digests)


def verify_digests(shards: Shards, recorded: Mapping[str, str], on_bytes: OnBytes) -> int:
    """Compare every tensor with what `read_digests` gave; the number of tensors.

    Raises CheckpointError naming the first tensor, in the order of files, that differs.
    """
    found = _digests(shards, on_bytes)
    changed = [name for name, digest in found.items() if recorded.get(name) != digest]
    if changed:
        entry = shards.tensors[changed[0]]
        more = f" (and of {len(changed) - 1} more tensors)" if len(changed) > 1 else ""
        raise CheckpointError(
            f"{entry.path}: the bytes of {entry.name}{more} are not those that were recorded; "
            "fetch the file again"
        )
    return len(found)


def read_digests(path: Path) -> dict[str, str]:
    """Digest by tensor name; raises UsageError where `path` is no file of this format."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 ({error.reason})") from None
    digests = {}
    for number, line in enumerate(lines, 1):
        matched = _LINE.fullmatch(line)
        if matched is None:
            raise UsageError(f"{path}: line {number} is not a digest and a tensor's name")
        digests[matched[2]] = matched[1]
    return digests


def _digests(shards: Shards, on_bytes: OnBytes) -> dict[str, str]:
    """Digest by tensor name, in the order of files and of tensors in them."""

    def digest(entry: TensorEntry) -> str:
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for block in _blocks(entry, on_bytes):
            digest.update(block)
        return digest.hexdigest()

    return {entry.name: result for entry, result in _for_each(shards.tensors.values(), digest)}


def _for_each(
    entries: Iterable[TensorEntry], work: Callable[[TensorEntry], T]
) -> list[tuple[TensorEntry, T]]:
    """`work` on every tensor: files side by side, each from its beginning to its end."""
    ordered = sorted(entries, key=lambda entry: (entry.path, entry.offset))
    files = [list(group) for _, group in groupby(ordered, key=lambda entry: entry.path)]
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        parts = pool.map(lambda tensors: [(entry, work(entry)) for entry in tensors], files)
        return [pair for part in parts for pair in part]


def _blocks(entry: TensorEntry, on_bytes: OnBytes) -> Iterator[bytes]:
    """A tensor's bytes; raises CheckpointError where the disk does not give them all."""
    try:
        with entry.path.open("rb") as file:
            file.seek(entry.offset)
            left = entry.nbytes
            while left:
                block = file.read(min(left, BLOCK_BYTES))
                if not block:
                    raise CheckpointError(f"{entry.path}: ends inside {entry.name}; fetch it again")
                yield block
                on_bytes(len(block))
                left -= len(block)
    except OSError as error:
        raise CheckpointError(
            f"{entry.path}: {entry.name} cannot be read ({error.strerror}); is the disk sound?"
        ) from None
