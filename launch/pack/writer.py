"""Writes a pack of experts: a layer at a time, read back before it counts.

Owns the order of writes: a layer's experts reach the disk before the table says that they are
there, so that a run that was killed is gone on with where it was. The file takes its name when it
is whole.
"""

from __future__ import annotations

import mmap
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from expert_io.disk import ShardFiles
from expert_io.packed import WRITTEN, PackHeader, Table, read_pack, read_table
from expert_io.slices import BLOCK
from protocol.errors import CheckpointError, HeadraceError, ReadError, ResourceError, UsageError
from protocol.layouts import PLACES
from protocol.shards import Shards
from protocol.tensor_table import expert_tensor

SUFFIX = ".partial"
# Left free on the disk.
SLACK_BYTES = 64 << 20


def write_pack(
    shards: Shards, output: Path, identity: str, on_expert: Callable[[int], None]
) -> bool:
    """Make the pack at `output`, or finish what an earlier call began; False where it is there.

    `on_expert(bytes)` is called for each expert as it is verified, or found to have been. Raises
    CheckpointError where `output` is another file, UsageError where it is a directory,
    ResourceError where it cannot be written, and ReadError where what was read back differs from
    the shards.
    """
    header = PackHeader.of(shards, identity)
    if os.path.isdir(output):
        raise UsageError(
            f"{output}: is a directory; name a file to write, as {output / 'experts.pack'}"
        )
    if os.path.exists(output):
        read_pack(output, header)
        return False
    partial = output.with_name(output.name + SUFFIX)
    try:
        table = _begin(partial, header)
        with partial.open("r+b", buffering=0) as file:
            for layer in range(header.layers):
                if (table[layer] < WRITTEN).any():
                    table[layer] = _write_layer(shards, header, layer, file.fileno())
                    os.fsync(file.fileno())
                    verify_layer(partial, header, layer, table)
                    at = BLOCK + 8 * layer * header.experts
                    os.pwrite(file.fileno(), table[layer].tobytes(), at)
                for _ in range(header.experts):
                    on_expert(header.stride)
            os.fsync(file.fileno())
        os.replace(partial, output)
    except OSError as error:
        raise ResourceError(
            f"{partial}: cannot be written ({error.strerror}); the same command goes on"
        ) from None
    return True


def verify_layer(path: Path, header: PackHeader, layer: int, table: Table) -> None:
    """Compare a layer's experts on disk with the table, past the page cache where possible.

    Raises ReadError.
    """
    files = ShardFiles([str(path)], direct=True)
    with mmap.mmap(-1, header.stride) as block, memoryview(block) as memory:
        for expert in range(header.experts):
            at = header.offset(layer, expert)
            files.read(0, at, header.stride, memory)
            if zlib.crc32(memory) | WRITTEN != int(table[layer, expert]):
                raise ReadError(
                    f"{path}: layer {layer} expert {expert}, at offset {at}, is not what was "
                    "written; the disk may be failing"
                )


def _begin(partial: Path, header: PackHeader) -> Table:
    """The table of an unfinished file, made where there is none."""
    if partial.exists():
        with partial.open("rb") as file:
            return read_table(partial, header, file)
    free = shutil.disk_usage(partial.absolute().parent).free
    if header.nbytes + SLACK_BYTES > free:
        raise ResourceError(
            f"{partial}: the pack takes {header.nbytes >> 20} MiB, and {free >> 20} MiB are free"
        )
    fresh = partial.with_name(partial.name + ".new")
    with fresh.open("wb") as file:
        file.write(header.packed())
        file.truncate(header.nbytes)
    # Only a file of its full size counts as one that was begun.
    os.replace(fresh, partial)
    return np.zeros((header.layers, header.experts), "<u8")


def _write_layer(shards: Shards, header: PackHeader, layer: int, output: int) -> Table:
    """Copy a layer's experts; their table row."""
    row = np.zeros(header.experts, "<u8")
    descriptors: dict[Path, int] = {}
    try:
        for expert in range(header.experts):
            content = bytearray(header.stride)
            for place, (offset, nbytes) in zip(PLACES, header.tensors, strict=True):
                entry = shards.tensors[expert_tensor(layer, expert, *place.split("."))]
                if entry.path not in descriptors:
                    descriptors[entry.path] = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
                part = memoryview(content)[offset : offset + nbytes]
                got = os.preadv(descriptors[entry.path], [part], entry.offset)
                if got != nbytes:
                    raise CheckpointError(
                        f"{entry.path}: {entry.name} has {got} of {nbytes} bytes; fetch it again"
                    )
                # A copy must not push the rest of the machine out of its page cache.
                os.posix_fadvise(
                    descriptors[entry.path], entry.offset, nbytes, os.POSIX_FADV_DONTNEED
                )
            _write_all(output, content, header.offset(layer, expert))
            row[expert] = zlib.crc32(content) | WRITTEN
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return row


def _write_all(descriptor: int, content: bytearray, offset: int) -> None:
    done = 0
    with memoryview(content) as view:
        while done < len(view):
            count = os.pwrite(descriptor, view[done:], offset + done)
            if count == 0:
                raise HeadraceError(f"no bytes could be written at offset {offset + done}")
            done += count
