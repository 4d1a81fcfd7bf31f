"""`headrace synth`: write a random checkpoint of any geometry in the released format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click

from engram_io.token_map import TokenMap
from launch.foreground import byte_progress, console
from launch.options import format_size
from launch.ranges import PATH, Integer
from launch.synth.geometry import PRESETS, config_json, text_config
from launch.synth.tokenizer import IMAGE, make_tokenizer
from launch.synth.weights import RandomWeights
from launch.synth.writer import checkpoint_bytes, write_checkpoint
from protocol.config import ModelConfig
from protocol.errors import CheckpointError, ResourceError, UsageError

# What headers and the tokenizer take beside the tensors.
SLACK_BYTES = 64 << 20


# What a checkpoint could have of anything.
SIZE = Integer(0, 1 << 32)
SYNTH_SEED = Integer(0, (1 << 63) - 1)


@click.command("synth")
@click.argument("directory", metavar="DIR", type=PATH)
@click.option(
    "--preset",
    type=click.Choice(sorted(PRESETS)),
    default="mini",
    show_default=True,
    help="mini: seconds and megabytes; wide: the released widths, few layers and experts; "
    "released: all of it.",
)
@click.option("--layers", type=SIZE, help="Number of layers.")
@click.option("--experts", type=SIZE, help="Routed experts in each layer.")
@click.option("--vocab", type=SIZE, help="Size of the vocabulary.")
@click.option("--engram-rows", type=SIZE, help="Rows of each engram table, about.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Any text_config key.")
@click.option(
    "--seed",
    type=SYNTH_SEED,
    default=0,
    show_default=True,
    help="The same seed gives the same bytes.",
)
@click.option("--force", is_flag=True, help="Write into a directory that is not empty.")
def synth_command(
    directory: Path,
    preset: str,
    layers: int | None,
    experts: int | None,
    vocab: int | None,
    engram_rows: int | None,
    changes: tuple[str, ...],
    seed: int,
    force: bool,
) -> None:
    """Write a checkpoint with random weights to DIR, laid out like the release.

    It generates noise at the speed of real weights, which is what it is for.

    \b
    headrace synth /tmp/mini
    headrace synth /nvme/wide --preset wide --layers 40 --experts 64
    headrace synth /tmp/odd --set sliding_window=32 --set hidden_size=256
    """
    if directory.is_dir() and any(directory.iterdir()) and not force:
        raise UsageError(f"{directory}: is not empty; choose another or give --force")
    chosen = {"num_hidden_layers": layers, "n_routed_experts": experts, "vocab_size": vocab}
    overrides = {name: value for name, value in chosen.items() if value is not None}
    overrides |= dict(_parse_change(change) for change in changes)
    synthesize(directory, preset, overrides, engram_rows, seed)


def synthesize(
    directory: Path,
    preset: str,
    changes: dict[str, Any],
    engram_rows: int | None = None,
    seed: int = 0,
) -> ModelConfig:
    """Write the checkpoint; its config. Raises UsageError and, where it has no room, ResourceError.

    `engram_rows` is about how many rows each table gets; exactly the sum of its primes.
    """
    if engram_rows is not None:
        probe = text_config(preset, changes)
        heads = (probe["engram_max_ngram_size"] - 1) * probe["engram_n_heads"]
        changes = {**changes, "engram_vocab_size": max(2, engram_rows // max(1, heads))}
    text = text_config(preset, changes)
    tokenizer = make_tokenizer(text["vocab_size"])
    token_map = TokenMap.from_tokenizer(tokenizer, text["vocab_size"])
    text["engram_compressed_vocab_size"] = token_map.size
    document = config_json(text, tokenizer.get_vocab(with_added_tokens=True)[IMAGE])
    try:
        config = ModelConfig.from_dict(document, directory / "config.json")
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    total = checkpoint_bytes(config)
    _make_room(directory, total)
    documents = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({"add_bos_token": False, "add_eos_token": False}),
        "generation_config.json": json.dumps({"do_sample": False, "eos_token_id": 1}),
    }
    with byte_progress() as progress:
        task = progress.add_task(f"writing {directory}", total=total)
        write_checkpoint(
            directory,
            document,
            documents,
            RandomWeights(seed),
            lambda count: progress.advance(task, count),
        )
    console.print(
        f"{directory}: {config.num_hidden_layers} layers, {config.n_routed_experts} experts each, "
        f"{format_size(total)}; look at it with headrace check {directory}"
    )
    return config


def _make_room(directory: Path, total: int) -> None:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if total + SLACK_BYTES > free:
        raise ResourceError(
            f"{directory}: the checkpoint takes {format_size(total)} and {format_size(free)} are "
            "free; choose fewer layers or experts, or another disk"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"{directory}: cannot be made ({error.strerror})") from None


def _parse_change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    try:
        if equals:
            return key, json.loads(value)
    except ValueError:
        pass  # not JSON: the same complaint as for a missing value
    raise UsageError(f"--set {text!r}: expected KEY=VALUE with a JSON value")
