"""`headrace synth`: a random checkpoint in the released format, to try any geometry with."""

from __future__ import annotations

from pathlib import Path

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from launch.foreground import console
from launch.options import format_size
from launch.synth.geometry import config_file, text_config
from launch.synth.tokenizer import synthetic_tokenizer
from launch.synth.weights import RandomWeights
from launch.synth.writer import payload_bytes, write_checkpoint
from protocol.config import ModelConfig
from protocol.errors import UsageError
from protocol.tensor_table import expected_tensors


@click.command("synth")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--preset",
    type=click.Choice(["mini", "wide"]),
    default="mini",
    show_default=True,
    help="mini: every kind of layer in a few MB; wide: the released widths, 6 layers, 16 experts.",
)
@click.option("--layers", type=int, help="Depth; the released pattern of layers is kept.")
@click.option("--experts", type=int, help="Routed experts a layer.")
@click.option("--drafts", type=int, help="Draft layers.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any other key of text_config, for example hidden_size=1024; may be given repeatedly.",
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same files.")
def synth_command(
    directory: Path,
    preset: str,
    layers: int | None,
    experts: int | None,
    drafts: int | None,
    changes: tuple[str, ...],
    seed: int,
) -> None:
    """Write a checkpoint with random weights to DIR.

    Its files are laid out as the release's, so that reading, memory and speed can be tried without
    the real weights. The text it generates is noise.

    \b
    headrace synth /tmp/mini
    headrace synth /data/wide --preset wide --layers 8 --experts 64
    headrace synth /data/tables --preset wide --set engram_vocab_size=1000000
    """
    synthesize(
        directory, preset, layers=layers, experts=experts, drafts=drafts, changes=changes, seed=seed
    )


def synthesize(
    directory: Path,
    preset: str = "mini",
    *,
    layers: int | None = None,
    experts: int | None = None,
    drafts: int | None = None,
    changes: tuple[str, ...] = (),
    seed: int = 0,
) -> None:
    """Write a random checkpoint; raises UsageError, CheckpointError, ResourceError."""
    text = text_config(preset, layers=layers, experts=experts, drafts=drafts, changes=changes)
    if type(text["vocab_size"]) is not int:
        raise UsageError(f"vocab_size is {text['vocab_size']!r}, expected a whole number")
    tokenizer = synthetic_tokenizer(text["vocab_size"])
    whole = config_file(text, tokenizer)
    config = ModelConfig.from_dict(whole, directory / "config.json")
    weights, total = RandomWeights(seed), payload_bytes(config)
    console.print(f"writing {format_size(total)} to {directory}")
    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        write_checkpoint(
            directory,
            whole,
            {"tokenizer.json": tokenizer.to_str(pretty=True)},
            ((name, weights.chunks(name, spec)) for name, spec in expected_tensors(config).items()),
            on_bytes=lambda count: bar.advance(task, count),
        )
    console.print(f"wrote {directory}; headrace check {directory} says what it holds")
