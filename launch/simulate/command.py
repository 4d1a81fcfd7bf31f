"""`headrace simulate`: what another cache, policy, disk or predictor would have done to a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from expert_io.policies import DEFAULT_POLICY, POLICIES
from expert_io.slices import SliceMap
from launch.options import GIB, parse_cache
from launch.ranges import (
    COUNT,
    MICROSECONDS,
    MILLISECONDS,
    PATH,
    PIECE,
    RATE,
    READERS,
    SECONDS,
    Integer,
    Size,
)
from launch.simulate.account import BELADY, Run, simulate
from launch.simulate.disk import DiskModel
from launch.simulate.passes import OFF, Foretold, Times
from launch.simulate.plot import write_plot
from launch.simulate.replay import Machine, plain_slices
from launch.simulate.table import results_table
from protocol.config import ModelConfig
from protocol.errors import UsageError
from protocol.identity import checkpoint_identity
from protocol.route_trace import RouteTrace
from protocol.shards import Shards

IN_FLIGHT = Integer(0, 1024)
RESERVE = Integer(1, 1 << 20)
STEPS = Integer(0, 1 << 40)
# To the service, to a reader, and back.
MESSAGES_OF_A_MISS = 4
# 0.2 ms were measured where a message took 0.45.
TURNS_OF_A_MISS = 8


@click.command("simulate")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=PATH)
@click.option(
    "--cache",
    "caches",
    multiple=True,
    default=["50%"],
    show_default=True,
    help="Slots, or a share of all experts such as 25%.  [repeatable]",
)
@click.option(
    "--bandwidth",
    "bandwidths",
    multiple=True,
    type=RATE,
    help="The disk's bytes a second, such as 3GB.  [repeatable; default: 3GB]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice([*sorted(POLICIES), BELADY, "all"]),
    default=[DEFAULT_POLICY],
    show_default=True,
    help="Which expert gives up its slot; belady knows the future.  [repeatable]",
)
@click.option(
    "--prefetch",
    "predictors",
    multiple=True,
    default=[OFF],
    show_default=True,
    help="A predictor of the trace (gate.moe.1, or fitted.moe.1 where gates were fitted), several "
    "joined by +, oracle, oracle:1 (only one layer ahead), or off.  [repeatable]",
)
@click.option(
    "--latency",
    type=SECONDS,
    default=100e-6,
    show_default=True,
    help="Seconds before a read's bytes.",
)
@click.option(
    "--concurrency",
    type=READERS,
    default=1,
    show_default=True,
    help="Reads at once that get all of the bandwidth; as many as readers for an emulated disk.",
)
@click.option("--bench", type=PATH, help="Bandwidth from this output of `bench io --json`.")
@click.option(
    "--layer-ms", type=MILLISECONDS, help="A layer's computing time.  [default: as recorded]"
)
@click.option(
    "--expert-size", type=Size(1, 1 << 40), help="Bytes of an expert.  [default: as recorded]"
)
@click.option("--checkpoint", type=PATH, help="Take its experts' ranges of bytes as they lie.")
@click.option(
    "--piece", type=PIECE, default="4MiB", show_default=True, help="Most bytes of one read."
)
@click.option("--readers", type=READERS, default=4, show_default=True, help="Reader processes.")
@click.option(
    "--in-flight",
    type=IN_FLIGHT,
    default=2,
    show_default=True,
    help="Predicted experts read at once.",
)
@click.option("--reserve", type=RESERVE, help="Slots kept free.  [default: top-k]")
@click.option(
    "--miss-us",
    type=MICROSECONDS,
    default=1500.0,
    show_default=True,
    help="What a miss takes beyond its reads, as `headrace bench miss` measures it.",
)
@click.option(
    "--turn-us",
    type=MICROSECONDS,
    help="From one read of a reader to its next, measured likewise.  [default: an eighth of "
    "--miss-us]",
)
@click.option(
    "--warm", type=STEPS, default=64, show_default=True, help="First steps that no figure counts."
)
@click.option("--steps", type=COUNT, help="Most steps of each trace.  [default: all]")
@click.option("--eager", is_flag=True, help="Read every guess as published, whatever it costs.")
@click.option("--plot", type=PATH, help="Draw waiting by cache and bandwidth into this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def simulate_command(
    traces: tuple[Path, ...],
    caches: tuple[str, ...],
    bandwidths: tuple[int, ...],
    policies: tuple[str, ...],
    predictors: tuple[str, ...],
    bench: Path | None,
    layer_ms: float | None,
    warm: int,
    steps: int | None,
    eager: bool,
    plot: Path | None,
    as_json: bool,
    **machine: Any,
) -> None:
    """Replay route traces through the service's own residency, policies and scheduler.

    TRACE are files of --route-trace. Every combination of the repeatable options is run.

    \b
    headrace simulate run.routes --policy all --policy belady --cache 50%
    headrace simulate run.routes --cache 25% --cache 50% --bandwidth 1GB --bandwidth 7GB \\
        --prefetch gate.moe.1 --prefetch oracle --expert-size 18.8MB --layer-ms 1
    """
    opened = [RouteTrace(path) for path in traces]
    chosen = [Foretold(name) for name in predictors]
    for trace, foretold in product(opened, chosen):
        _check_alike(opened[0], trace)
        foretold.check(trace)
    disks = [_bench_bandwidth(bench)] if bench is not None else []
    disks += [float(bandwidth) for bandwidth in bandwidths] or ([] if disks else [3e9])
    names = sorted(POLICIES) if "all" in policies else []
    names += [name for name in dict.fromkeys(policies) if name != "all" and name not in names]
    times = Times(None if layer_ms is None else layer_ms / 1e3)
    template = Run(opened, _machine(opened[0], **machine), "", chosen[0], times, warm, steps)
    results: list[dict[str, Any]] = []
    count = len(caches) * len(disks) * len(names) * len(chosen)
    with Console(stderr=True).status("simulating") as status:

        def at_step(step: int) -> None:
            status.update(f"simulating: run {len(results) + 1} of {count}, step {step}")

        for figures in _every(template, caches, disks, names, chosen, eager, at_step):
            results.append(figures)
    if plot is not None:
        write_plot(results, plot)
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        # Piped, a table is as wide as it needs to be.
        wide = Console()
        (wide if wide.is_terminal else Console(width=160)).print(results_table(results))


def _every(
    template: Run,
    caches: Sequence[str],
    disks: Sequence[float],
    policies: Sequence[str],
    predictors: Sequence[Foretold],
    eager: bool,
    at_step: Callable[[int], None],
) -> Iterator[dict[str, Any]]:
    """Every combination's figures; without prefetch first, to which the others compare."""
    ordered = sorted(predictors, key=lambda foretold: foretold.predicts)
    for cache, bandwidth, policy in product(caches, disks, policies):
        machine = replace(
            template.machine,
            slots=_slots(cache, template.machine),
            disk=replace(template.machine.disk, bandwidth=bandwidth),
        )
        waited = None
        for foretold in ordered:
            run = replace(
                template,
                machine=machine if foretold.predicts else replace(machine, predicted_in_flight=0),
                policy=policy,
                foretold=foretold,
                eager=eager and foretold.predicts,
            )
            figures = simulate(run, at_step)
            stalled = figures["stalled_ms_per_token"]
            if not foretold.predicts:
                waited = stalled
            elif waited:
                figures["hidden"] = 1 - stalled / waited
            yield figures


def _machine(
    trace: RouteTrace,
    *,
    latency: float,
    concurrency: int,
    expert_size: int | None,
    checkpoint: Path | None,
    piece: int,
    readers: int,
    in_flight: int,
    reserve: int | None,
    miss_us: float,
    turn_us: float | None,
) -> Machine:
    header = trace.header
    if checkpoint is not None:
        if checkpoint_identity(checkpoint) != header.identity:
            raise UsageError(f"{trace.path}: was not recorded with the checkpoint in {checkpoint}")
        config = ModelConfig.load(checkpoint)
        shards = Shards.open(checkpoint, config)
        slices = SliceMap.build(config, shards, piece)
    else:
        nbytes = expert_size or header.expert_bytes
        slices = plain_slices(header.layers, header.experts, nbytes, piece)
    return Machine(
        slots=0,
        readers=readers,
        reserve=header.top_k if reserve is None else reserve,
        disk=DiskModel(1.0, latency, concurrency),
        slices=slices,
        predicted_in_flight=in_flight,
        message_s=miss_us / MESSAGES_OF_A_MISS / 1e6,
        turn_s=(miss_us / TURNS_OF_A_MISS if turn_us is None else turn_us) / 1e6,
    )


def _slots(cache: str, machine: Machine) -> int:
    """Slots for `cache`; raises UsageError for fewer than any layer can live with."""
    every = machine.layers * machine.experts
    if re.fullmatch(r"\s*[0-9]{1,18}\s*", cache):
        slots = int(cache)
    else:
        _, share = parse_cache(cache)
        if share is None:
            raise UsageError(f"--cache {cache}: expected a number of slots or a share such as 25%")
        slots = int(share * every)
    if slots > 4 * every:
        raise UsageError(f"--cache {cache} is {slots} slots for {every} experts; 100% holds all")
    least = 2 * machine.reserve + machine.predicted_in_flight + 2
    if slots < least:
        raise UsageError(f"--cache {cache} is {slots} slots; a layer needs {least}")
    return slots


def _check_alike(one: RouteTrace, other: RouteTrace) -> None:
    same = ("identity", "layers", "experts", "top_k")
    if any(getattr(one.header, name) != getattr(other.header, name) for name in same):
        raise UsageError(f"{other.path}: is of another checkpoint than {one.path}")


def _bench_bandwidth(path: Path) -> float:
    """Bytes/s that the reader pool reached."""
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["pool_gib_s"]) * GIB
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{path}: is no output of `headrace bench io --json`") from None
