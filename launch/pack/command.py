"""`headrace pack`: make, go on with, or verify an aligned copy of a checkpoint's experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from expert_io.packed import WRITTEN, PackHeader, read_pack
from launch.foreground import byte_progress, console
from launch.options import format_size
from launch.pack.writer import verify_layer, write_pack
from launch.ranges import PATH
from protocol.config import ModelConfig
from protocol.errors import CheckpointError
from protocol.identity import checkpoint_identity
from protocol.shards import Shards


@click.command("pack")
@click.argument("directory", metavar="DIR", type=PATH)
@click.argument("output", metavar="OUT", type=PATH)
@click.option("--verify", is_flag=True, help="Only compare OUT with its checksums.")
def pack_command(directory: Path, output: Path, verify: bool) -> None:
    """Copy the experts of the checkpoint in DIR to OUT, aligned for reading.

    In OUT every expert is one range that O_DIRECT takes as it is, layer after layer, where the
    shards have two ranges with a rim each. What is written is read back. A command that was ended
    goes on where it was when given again. OUT takes as much room as the experts do; use it with
    --pack OUT.

    \b
    headrace pack DIR /fast/experts.pack
    headrace serve DIR --pack /fast/experts.pack
    """
    shards = Shards.open(directory, ModelConfig.load(directory))
    identity = checkpoint_identity(directory)
    header = PackHeader.of(shards, identity)
    with byte_progress() as progress:
        task = progress.add_task(
            "verifying" if verify else "packing",
            total=header.layers * header.experts * header.stride,
        )

        def on_expert(count: int) -> None:
            progress.advance(task, count)

        if verify:
            _verify(output, header, on_expert)
            done = "as written"
        elif write_pack(shards, output, identity, on_expert):
            done = "written and read back"
        else:
            done = "there already"
    count = header.layers * header.experts
    console.print(
        f"{output}: {count} experts of {format_size(header.stride)}, {done}; use it with --pack"
    )


def _verify(path: Path, header: PackHeader, on_expert: Callable[[int], None]) -> None:
    """Raises CheckpointError and ReadError."""
    table = read_pack(path, header)
    if (table < WRITTEN).any():
        raise CheckpointError(f"{path}: is not whole; finish it with headrace pack")
    for layer in range(header.layers):
        verify_layer(path, header, layer, table)
        on_expert(header.experts * header.stride)
