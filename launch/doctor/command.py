"""The command: looks, measures, advises, and shows it to a person or a script."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from launch.check import Findings, inspect
from launch.doctor.advice import Advice, Estimate, advise
from launch.doctor.machine import Machine, look
from launch.doctor.measure import DiskSpeed, MemorySpeed, measure_disk, measure_memory
from launch.foreground import console as progress
from launch.options import format_size
from launch.ranges import PATH
from protocol.config import ModelConfig


@click.command("doctor")
@click.argument("directory", metavar="DIR", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="For a script.")
def doctor_command(directory: Path, as_json: bool) -> None:
    """What this machine has, what the checkpoint in DIR needs, and what follows.

    Reads the disk for about five seconds. Each warning comes with what mends it; the exit code is 0
    also where there are some.
    """
    with progress.status("checking the checkpoint"):
        needs, config = inspect(directory), ModelConfig.load(directory)
        machine = look(directory)
    with progress.status("reading the disk as the engine does"):
        shards = sorted(directory.glob("*.safetensors"))
        disk = measure_disk(shards, needs.expert_bytes)
    with progress.status("measuring memory"):
        memory = measure_memory("cuda" if machine.gpu else "cpu")
    rows = config.engram_rows_per_token * len(config.engram_layer_ids)
    advice = advise(directory, needs, machine, disk, memory, rows)
    if as_json:
        click.echo(json.dumps(_as_json(needs, machine, disk, memory, advice), indent=2))
        return
    _show(Console(), directory, needs, machine, disk, memory, advice)


def _as_json(
    needs: Findings, machine: Machine, disk: DiskSpeed, memory: MemorySpeed, advice: Advice
) -> dict[str, Any]:
    return {
        "machine": asdict(machine),
        "disk": {
            **asdict(disk),
            "best_readers": disk.best_readers,
            "bytes_per_s": disk.bandwidth,
        },
        "memory_bytes_per_s": memory.rate,
        "link_bytes_per_s": memory.link,
        "needs": {name: getattr(needs, name) for name in needs.__slots__},
        "device": advice.device,
        "cache_bytes": advice.cache_bytes,
        "cache_share": advice.cache_share,
        "options": advice.options,
        "likely": _estimate_json(advice.likely),
        "worst": _estimate_json(advice.worst),
        "warnings": [asdict(warning) for warning in advice.warnings],
    }


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    more = {"tokens_per_s": estimate.tokens_per_s, "binds": estimate.binds}
    return {**asdict(estimate), **more}


def _show(
    console: Console,
    directory: Path,
    needs: Findings,
    machine: Machine,
    disk: DiskSpeed,
    memory: MemorySpeed,
    advice: Advice,
) -> None:
    rate = f"{format_size(memory.rate)}/s"
    _section(
        console,
        "this machine",
        [
            ("system", f"{machine.system}, torch {machine.torch}"),
            ("GPU", _gpu(machine, rate)),
            ("CPUs", f"{machine.cpus:g} of {machine.cores} cores"),
            (
                "memory",
                f"{format_size(machine.available)} available of {format_size(machine.memory)}"
                + ("" if machine.gpu else f", copies at {rate}"),
            ),
            ("locked memory", _limit(machine.memlock)),
            (
                "disk",
                f"{machine.file_system}, {'O_DIRECT' if disk.direct else 'page cache'}; by readers "
                + ", ".join(f"{n}: {format_size(r)}/s" for n, r in disk.by_readers.items()),
            ),
            ("engram rows", f"{disk.rows_per_s:,.0f} reads a second"),
            (
                "page cache",
                f"repeated reads at {format_size(disk.cached)}/s, which the engine's own"
                " cache replaces",
            ),
        ],
    )
    _section(
        console,
        f"{directory} needs",
        [
            ("on disk", format_size(sum(needs.file_bytes.values()))),
            ("dense weights", f"{format_size(needs.dense_memory_cpu)} on a CPU, half on a GPU"),
            ("smallest cache", format_size(needs.least_cache_bytes)),
            ("every expert", format_size(needs.full_cache_bytes)),
        ],
    )
    options = " ".join(f"--{name} {value}".strip() for name, value in advice.options.items())
    _section(
        console,
        "so",
        [
            ("start with", f"headrace serve {directory} {options}"),
            (
                "cache",
                f"{format_size(advice.cache_bytes)}, {advice.cache_share:.0%} of the experts",
            ),
            ("at most", _speed(advice.likely)),
            ("without locality", _speed(advice.worst)),
        ],
    )
    for warning in advice.warnings:
        console.print(f"[yellow]warning:[/yellow] {warning.what}")
        console.print(f"  [dim]mend:[/dim] {warning.mend}", soft_wrap=True)
    if not advice.warnings:
        console.print("[green]nothing to mend[/green]")


def _section(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, box=None, title_justify="left")
    table.add_column(style="dim", min_width=16)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table, "")


def _gpu(machine: Machine, rate: str) -> str:
    if machine.gpu is None:
        return "none that torch can use"
    gpu = machine.gpu
    return (
        f"{gpu.name}, {format_size(gpu.free)} free of {format_size(gpu.memory)}, copies at {rate}"
    )


def _limit(memlock: int | None) -> str:
    return "no limit" if memlock is None else format_size(memlock)


def _speed(estimate: Estimate) -> str:
    crossing = f"{estimate.link_ms:.0f} ms to the GPU, " if estimate.link_ms else ""
    # Two figures of so rough an estimate, in plain digits.
    speed = format(estimate.tokens_per_s, ".0f" if estimate.tokens_per_s >= 10 else ".2g")
    return (
        f"about {speed} tokens/s, with {estimate.found:.0%} of experts found "
        f"in memory: {estimate.disk_ms:.0f} ms disk, {estimate.engram_ms:.1f} ms engram, "
        f"{crossing}{estimate.memory_ms:.1f} ms memory a token; bound by {estimate.binds}"
    )
