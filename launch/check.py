"""`headrace check`: is a checkpoint whole, what does it hold, and what does it need?"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.progress import Progress as ProgressBar
from rich.table import Table

from engram_io.rows import locate_tables
from engram_io.token_map import TokenMap
from expert_io.slices import SliceMap
from launch.foreground import console
from launch.group import load_tokenizer
from launch.memory import dense_bytes, in_flight_slots, minimum_slots
from launch.options import format_size
from protocol.config import ModelConfig
from protocol.errors import CheckpointError
from protocol.shards import Shards, TensorEntry

NAN_SCALE = 255
PIECE_BYTES = 4 << 20
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Findings:
    """What a sound checkpoint holds and needs; sizes in bytes."""

    layers: int
    experts_per_layer: int
    experts_per_token: int
    expert_bytes: int
    file_bytes: dict[str, int]
    token_classes: int
    token_map_sha256: str
    dense_memory_cpu: int
    least_cache_slots: int
    least_cache_bytes: int
    full_cache_bytes: int
    reads_per_expert: float
    warnings: tuple[str, ...]


def inspect(directory: Path) -> Findings:
    """Check structure, shapes and tokenizer; raises CheckpointError for the first thing wrong."""
    config = ModelConfig.load(directory)
    shards = Shards.open(directory, config)
    load_tokenizer(directory)
    token_map = TokenMap.load(directory, config)
    locate_tables(shards, config)
    slices = SliceMap.build(config, shards, PIECE_BYTES)
    least = minimum_slots(config, in_flight_slots(config))
    every = config.num_hidden_layers * config.n_routed_experts
    pieces = sum(len(e.pieces) for row in slices.experts for e in row)
    return Findings(
        layers=config.num_hidden_layers,
        experts_per_layer=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        expert_bytes=slices.slot_bytes,
        file_bytes=_bytes_by_kind(shards),
        token_classes=token_map.size,
        token_map_sha256=token_map.digest,
        dense_memory_cpu=dense_bytes(config),
        least_cache_slots=least,
        least_cache_bytes=least * slices.slot_bytes,
        full_cache_bytes=every * slices.slot_bytes,
        reads_per_expert=pieces / every,
        warnings=shards.warnings,
    )


def _bytes_by_kind(shards: Shards) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for name, entry in shards.tensors.items():
        sizes[_kind(name)] += entry.nbytes
    return dict(sizes)


def _kind(name: str) -> str:
    if name.startswith("mtp."):
        return "draft layers"
    if ".ffn.experts." in name:
        return "routed experts"
    if ".engram.embed." in name:
        return "engram tables"
    return "dense" if name.startswith(("layers.", "embed.", "head.", "norm.")) else "vision"


def check_scales(shards: Shards) -> int:
    """Read every e8m0 scale; the number read. Raises CheckpointError naming a tensor with a NaN."""
    scales = [entry for entry in shards.tensors.values() if entry.dtype == "F8_E8M0"]
    with ProgressBar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading scales", total=sum(entry.nbytes for entry in scales))
        for entry in scales:
            _check_one(entry)
            bar.advance(task, entry.nbytes)
    return sum(math.prod(entry.shape) for entry in scales)


def _check_one(entry: TensorEntry) -> None:
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        left = entry.nbytes
        while left:
            block = file.read(min(left, BLOCK_BYTES))
            if not block:
                raise CheckpointError(f"{entry.path}: ends inside {entry.name}; fetch it again")
            if np.frombuffer(block, np.uint8).max() == NAN_SCALE:
                raise CheckpointError(
                    f"{entry.path}: {entry.name} has a scale that is not a number (byte 255); "
                    "fetch the file again"
                )
            left -= len(block)


@click.command("check")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--deep", is_flag=True, help="Also read every scale and look for NaN.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check_command(directory: Path, deep: bool, as_json: bool) -> None:
    """Check the checkpoint in DIR and say what it holds and needs.

    Reads the config, the index, every shard's header and the tokenizer, not the weights; --deep
    reads the scales too. Exit code 3 and one line for the first thing that is wrong.
    """
    found = inspect(directory)
    read: dict[str, Any] = {}
    if deep:
        config = ModelConfig.load(directory)
        read["scales_read"] = check_scales(Shards.open(directory, config))
    if as_json:
        fields = {name: getattr(found, name) for name in found.__slots__}
        click.echo(json.dumps({"directory": str(directory), **fields, **read}, indent=2))
        return
    for warning in found.warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}")
    console.print(_table(directory, found, read))


def _table(directory: Path, found: Findings, read: dict[str, Any]) -> Table:
    table = Table(title=f"{directory}: sound", show_header=False, box=None, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    experts = found.layers * found.experts_per_layer
    table.add_row(
        "model",
        f"{found.layers} layers, {experts} routed experts of {format_size(found.expert_bytes)}, "
        f"{found.experts_per_token} a layer for each token",
    )
    for kind, size in sorted(found.file_bytes.items(), key=lambda item: -item[1]):
        table.add_row(f"on disk, {kind}", format_size(size))
    table.add_row("on disk, all", format_size(sum(found.file_bytes.values())))
    table.add_row(
        "tokenizer",
        f"{found.token_classes} classes for the engram hash, sha256 {found.token_map_sha256[:12]}",
    )
    table.add_row("dense weights on a CPU", f"{format_size(found.dense_memory_cpu)} of memory")
    table.add_row(
        "smallest cache",
        f"{format_size(found.least_cache_bytes)} (--slots {found.least_cache_slots})",
    )
    table.add_row("every expert cached", format_size(found.full_cache_bytes))
    table.add_row("reads an expert", f"{found.reads_per_expert:.1f}")
    if read:
        table.add_row("scales", f"{read['scales_read']} read, none is NaN")
    return table
