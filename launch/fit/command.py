"""`headrace fit`: learn from route traces which experts come next, and keep that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from launch.ranges import PATH
from protocol.config import ModelConfig
from protocol.identity import PREDICTOR_NAME, checkpoint_identity
from protocol.shards import Shards

if TYPE_CHECKING:
    from launch.fit.learning import Result

RANK = click.IntRange(1, 65_536)


@click.command("fit")
@click.argument("directory", metavar="DIR", type=PATH)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=PATH)
@click.option("--test", "tests", multiple=True, type=PATH, help="A trace to measure on only.")
@click.option(
    "--rank", type=RANK, default=16, show_default=True, help="Rank of what is added to a gate."
)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--out", type=PATH, help=f"File to write.  [default: {PREDICTOR_NAME} in DIR]")
@click.option("--dry-run", is_flag=True, help="Only measure; keep nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def fit_command(
    directory: Path,
    traces: tuple[Path, ...],
    tests: tuple[Path, ...],
    rank: int,
    device: str,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Fit predictors of expert picks for the checkpoint in DIR.

    TRACE are files of --route-trace beside which activations were recorded (--route-trace-inputs).
    The result lies beside the checkpoint and is used from the next start on; it is refused once
    the checkpoint is another one.

    \b
    headrace generate DIR --prompt-file A --max-tokens 1 --route-trace a --route-trace-inputs
    headrace generate DIR --prompt-file B --max-tokens 1 --route-trace b --route-trace-inputs
    headrace fit DIR a --test b
    """
    # torch takes a second that --help should not.
    from compute.device import open_device
    from compute.weights import load_gates
    from launch.fit.learning import cost_us, learn, means, open_inputs, save

    config = ModelConfig.load(directory)
    shards = Shards.open(directory, config)
    identity = checkpoint_identity(directory)
    where = open_device(device)
    fitting, measuring = open_inputs(traces, identity), open_inputs(tests, identity)
    console = Console(stderr=True)
    gates = load_gates(shards, where)
    with console.status("fitting") as status:

        def on_result(result: Result) -> None:
            source, distance, layer = result.key
            status.update(f"fitting: layer {layer}, {source}, {distance} ahead")

        results = learn(
            gates,
            config.num_experts_per_tok,
            fitting,
            measuring,
            rank=rank,
            device=where,
            on_result=on_result,
        )
    figures: dict[str, Any] = {
        "tokens": sum(inputs.tokens for inputs in fitting),
        "test_tokens": sum(inputs.tokens for inputs in measuring),
        "rank": rank,
        "predict_us": cost_us(gates[-1], config.num_experts_per_tok),
        "predictors": means(results),
    }
    if not dry_run:
        path = out or directory / PREDICTOR_NAME
        save(path, results, identity, figures)
        console.print(f"{path}: {path.stat().st_size} bytes", highlight=False)
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        Console(width=100).print(_table(figures))
        click.echo(f"a prediction takes {figures['predict_us']:.0f} us a layer for one token")


def _table(figures: dict[str, Any]) -> Table:
    about = "of traces not fitted on" if figures["test_tokens"] else "of what was kept for that"
    table = Table(title=f"Share of picks named, means over layers, {about}")
    for name in ("predictor", "top k", "top 2k", "rare at p >= 0.6", "of those right"):
        table.add_column(name, justify="left" if name == "predictor" else "right")
    for row in figures["predictors"]:
        for who in ("own", "fitted"):
            of = row[who]
            method = "gate" if who == "own" else "fitted"
            shares = (of[part] for part in ("recall_k", "recall_2k", "sure", "sure_right"))
            name = f"{method}.{row['source']}.{row['distance']}"
            table.add_row(name, *(f"{share:.1%}" for share in shares))
    return table
