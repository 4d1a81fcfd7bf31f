"""`headrace check`: is a checkpoint whole, what does it hold, and what does it need?"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from engram_io.hashing import NgramHash
from engram_io.token_map import TokenMap
from expert_io.slices import SliceMap
from launch.contents import (
    check_scales,
    read_digests,
    record_digests,
    scale_tensors,
    verify_digests,
)
from launch.foreground import console
from launch.memory import dense_bytes, in_flight_slots, minimum_slots
from launch.options import format_size
from launch.ranges import PATH
from protocol.config import ModelConfig
from protocol.shards import Shards, TensorEntry
from protocol.tensor_table import kind_of

PIECE_BYTES = 4 << 20
# Of a table that goes to a file.
WIDTH = 100
# The map of the released tokenizer: 99,092 classes, and SHA-256 of it as little-endian int32.
RELEASED_CLASSES = 99_092
RELEASED_MAP_SHA256 = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


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
    token_map = TokenMap.load(directory, config)
    NgramHash.from_config(config, token_map.classes, directory / "config.json")
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
        warnings=(*shards.warnings, *_hash_warnings(config, token_map)),
    )


def _bytes_by_kind(shards: Shards) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for name, entry in shards.tensors.items():
        sizes[kind_of(name)] += entry.nbytes
    return dict(sizes)


def _hash_warnings(config: ModelConfig, token_map: TokenMap) -> list[str]:
    """A tokenizer of as many classes as the release's, which maps its tokens otherwise."""
    if config.engram_compressed_vocab_size != RELEASED_CLASSES or (
        token_map.digest == RELEASED_MAP_SHA256
    ):
        return []
    return [
        f"tokenizer.json: has the release's {RELEASED_CLASSES} classes for the engram hash but not "
        f"its map (sha256 {token_map.digest[:12]}, the release's {RELEASED_MAP_SHA256[:12]}); with "
        "the released engram tables every answer would be wrong, fetch tokenizer.json again"
    ]


@click.command("check")
@click.argument("directory", metavar="DIR", type=PATH)
@click.option("--deep", is_flag=True, help="Also read every scale and look for NaN.")
@click.option("--record", type=PATH, help="Write a digest of every tensor to this file.")
@click.option("--verify", type=PATH, help="Compare every tensor with such a file.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check_command(
    directory: Path, deep: bool, record: Path | None, verify: Path | None, as_json: bool
) -> None:
    """Check the checkpoint in DIR and say what it holds and needs.

    Reads the config, the index, every shard's header and the tokenizer, not the weights; --deep
    reads the scales too. Exit code 3 and one line for the first thing that is wrong.

    A bit that turns on disk changes the answers a little and nothing else. --record once after the
    download and --verify later find it; both read everything.

    \b
    headrace check DIR
    headrace check DIR --deep --json
    headrace check DIR --record DIR.digests
    headrace check DIR --verify DIR.digests
    """
    recorded = read_digests(verify) if verify else None
    found = inspect(directory)
    shards = Shards.open(directory, ModelConfig.load(directory))
    read: dict[str, Any] = {}
    if deep:
        with _reading("scales", scale_tensors(shards)) as on_bytes:
            read["scales_read"] = check_scales(shards, on_bytes)
    if recorded is not None:
        with _reading("all tensors", shards.tensors.values()) as on_bytes:
            read["tensors_verified"] = verify_digests(shards, recorded, on_bytes)
    if record is not None:
        with _reading("all tensors", shards.tensors.values()) as on_bytes:
            read["tensors_recorded"] = record_digests(shards, record, on_bytes)
    if as_json:
        fields = {name: getattr(found, name) for name in found.__slots__}
        click.echo(json.dumps({"directory": str(directory), **fields, **read}, indent=2))
        return
    for warning in found.warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}")
    width = None if sys.stdout.isatty() else WIDTH
    Console(highlight=False, width=width).print(_table(directory, found, read))


@contextmanager
def _reading(what: str, entries: Iterable[TensorEntry]) -> Iterator[Callable[[int], None]]:
    """A progress line for reading `entries`; gives what is to be called with the bytes read."""
    with Progress(
        TextColumn(f"reading {what}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=sum(entry.nbytes for entry in entries))
        yield lambda count: progress.advance(task, count)


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
    for key, row, says in (
        ("scales_read", "scales", "read, none is NaN"),
        ("tensors_verified", "digests", "tensors verified, none has changed"),
        ("tensors_recorded", "digests", "tensors recorded"),
    ):
        if key in read:
            table.add_row(row, f"{read[key]} {says}")
    return table
