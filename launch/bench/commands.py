"""The `bench` commands: their options and what they print.

The measurements stand in the modules beside this one, imported when asked for: two of them load
torch, which `--help` should not wait for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from launch.foreground import ended_by_signals
from launch.options import GroupOptions
from launch.ranges import (
    COUNT,
    MILLISECONDS,
    PATH,
    PIECE,
    RATE,
    READERS,
    ROUNDS,
    SECONDS,
    SHARE,
    THREADS,
    Integer,
    Size,
)
from protocol.busy_poll import BUSY_POLL_S
from protocol.specs import GRAPHS

ENGINE = GroupOptions(Path())  # its defaults
KERNELS_SHOWN = 20
# Fewer say nothing of how far a mean may be off.
DEMANDS = Integer(20, 1_000_000)
# Names of templates go on for lines.
KERNEL_NAME_WIDTH = 80

Command = TypeVar("Command", bound=Callable[..., Any])

of_checkpoint = click.argument("directory", metavar="DIR", type=PATH)
piece_option = click.option(
    "--piece", default="4MiB", show_default=True, type=PIECE, help="Most bytes of one read."
)
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print figures as JSON.")


def rounds_option(default: int) -> Callable[[Command], Command]:
    """`--rounds`, of which each benchmark needs its own number to be steady."""
    return click.option(
        "--rounds",
        default=default,
        type=ROUNDS,
        show_default=True,
        help="Rounds; medians are over them.",
    )


def _say(figures: dict[str, Any], as_json: bool, sentence: str) -> None:
    click.echo(json.dumps(figures, indent=2) if as_json else sentence)


@click.command("io")
@of_checkpoint
@click.option(
    "--readers",
    default=4,
    show_default=True,
    type=READERS,
    help="Reader processes, and preadv loops.",
)
@rounds_option(7)
@click.option(
    "--round",
    "round_size",
    type=Size(1, 1 << 50),
    default="2GiB",
    show_default=True,
    help="Bytes a round; at most half of the experts.",
)
@piece_option
@click.option("--direct/--buffered", default=True, show_default=True, help="Use O_DIRECT.")
@click.option(
    "--pack",
    type=PATH,
    help="Compare this packed copy with the shards instead, both through the service.",
)
@click.option("--small-pages", is_flag=True, help="Read into memory without huge pages, both ways.")
@as_json_option
def io_command(
    directory: Path,
    readers: int,
    rounds: int,
    round_size: int,
    piece: int,
    direct: bool,
    pack: Path | None,
    small_pages: bool,
    as_json: bool,
) -> None:
    """How fast the experts of the checkpoint in DIR come through the service.

    Against as many processes that only preadv the same bytes. For the released size without the
    released files: headrace synth DIR --preset wide.
    """
    from launch.bench.io import compare_pack, run

    sizes = (rounds, round_size, piece, direct)
    if pack is not None:
        with ended_by_signals():
            figures = compare_pack(directory, pack, readers, *sizes)
        reads = figures["reads_an_expert"]
        _say(
            figures,
            as_json,
            f"pack {figures['pack_gib_s']:.3f} GiB/s in {reads['pack']} reads an expert, shards "
            f"{figures['shards_gib_s']:.3f} GiB/s in {reads['shards']}, ratio "
            f"{figures['ratio']:.3f} (medians of {figures['rounds']} rounds, {readers} readers)",
        )
        return
    with ended_by_signals():
        figures = run(directory, readers, *sizes, huge_pages=not small_pages)
    _say(
        figures,
        as_json,
        f"pool {figures['pool_gib_s']:.3f} GiB/s, preadv {figures['preadv_gib_s']:.3f} GiB/s, "
        f"ratio {figures['ratio']:.3f} (medians of {figures['rounds']} rounds, "
        f"{figures['readers']} readers, experts of {figures['expert_bytes'] / 1e6:.1f} MB)",
    )


@click.command("ipc")
@of_checkpoint
@click.option("--hits", default=20000, show_default=True, type=ROUNDS, help="Looks to time.")
@click.option("--misses", default=200, show_default=True, type=ROUNDS, help="Misses to time.")
@click.option("--readers", default=1, show_default=True, type=READERS, help="Reader processes.")
@click.option(
    "--busy-poll/--no-busy-poll",
    default=None,
    help="Whether processes that wait look without sleeping; by default, as the cores allow.",
)
@as_json_option
def ipc_command(
    directory: Path, hits: int, misses: int, readers: int, busy_poll: bool | None, as_json: bool
) -> None:
    """What talking costs, over the checkpoint in DIR.

    Microseconds to find a layer's resident experts, and what the service adds to a miss beyond the
    read itself.
    """
    from launch.bench.ipc import run

    with ended_by_signals():
        seconds = None if busy_poll is None else BUSY_POLL_S * busy_poll
        figures = run(directory, hits, misses, readers, seconds)
    _say(
        figures,
        as_json,
        f"hit: {figures['hit_us_p50']:.1f} us for {figures['experts_a_layer']} experts "
        f"(p99 {figures['hit_us_p99']:.1f}); a miss adds {figures['miss_overhead_us_p50']:.0f} us "
        f"to its {_count(figures['reads_a_miss'], 'read')} (p99 "
        f"{figures['miss_overhead_us_p99']:.0f}), "
        f"two bare round trips take {figures['two_round_trips_us_p50']:.0f}",
    )


@click.command("miss")
@of_checkpoint
@click.option(
    "--disk-bandwidth",
    type=RATE,
    required=True,
    help="Slow all readers together down to this many bytes a second.",
)
@click.option("--disk-latency", type=SECONDS, default=0.0, help="And each read by these seconds.")
@click.option("--readers", default=4, show_default=True, type=READERS, help="Reader processes.")
@piece_option
@click.option(
    "--layer-ms",
    type=MILLISECONDS,
    default=5.0,
    show_default=True,
    help="What a layer computes between two demands.",
)
@click.option("--demands", default=800, show_default=True, type=DEMANDS, help="Demands to time.")
@as_json_option
def miss_command(
    directory: Path,
    disk_bandwidth: int,
    disk_latency: float,
    readers: int,
    piece: int,
    layer_ms: float,
    demands: int,
    as_json: bool,
) -> None:
    """What a miss takes beyond the disk's time, over the checkpoint in DIR, on an emulated disk.

    For `headrace simulate`: its --miss-us and --turn-us, with the --latency of this disk.
    """
    from launch.bench.miss import run

    with ended_by_signals():
        figures = run(
            directory,
            readers=readers,
            piece_bytes=piece,
            bandwidth=float(disk_bandwidth),
            latency=disk_latency,
            layer_s=layer_ms / 1e3,
            demands=demands,
        )
    turn_error = figures["turn_us_error"]
    _say(
        figures,
        as_json,
        f"a demand took {figures['took_us'] / 1e3:.2f} ms, of which the disk "
        f"{figures['disk_us'] / 1e3:.2f}; --miss-us {figures['miss_us']:.0f} "
        f"(+-{figures['miss_us_error']:.0f}) --turn-us {figures['turn_us']:.0f} "
        + ("(no demand has more turns)" if turn_error is None else f"(+-{turn_error:.0f})"),
    )


@click.command("group")
@of_checkpoint
@click.option("--tokens", default=64, show_default=True, type=ROUNDS, help="Tokens a round.")
@rounds_option(5)
@click.option(
    "--threads", default=1, show_default=True, type=THREADS, help="torch threads on both sides."
)
@as_json_option
def group_command(directory: Path, tokens: int, rounds: int, threads: int, as_json: bool) -> None:
    """What the process group costs, over the checkpoint in DIR, on the CPU.

    Tokens/s with every expert resident, against the same model with its weights in one process;
    both fit in memory only for a small checkpoint. The ratio is 1 where the group costs nothing.
    """
    from launch.bench.group import run

    figures = run(directory, tokens, rounds, threads)
    _say(
        figures,
        as_json,
        f"group {figures['group_tokens_per_s']:.2f} tokens/s, one process "
        f"{figures['one_process_tokens_per_s']:.2f}, ratio {figures['ratio']:.3f} "
        f"(medians of {figures['rounds']} rounds)",
    )


@click.command("trace")
@of_checkpoint
@click.option("--tokens", default=64, show_default=True, type=ROUNDS, help="Tokens a round.")
@rounds_option(7)
@click.option("--threads", default=1, show_default=True, type=THREADS, help="torch threads.")
@as_json_option
def trace_command(directory: Path, tokens: int, rounds: int, threads: int, as_json: bool) -> None:
    """What --trace costs a token, over the checkpoint in DIR, with every expert resident."""
    from launch.bench.trace import run

    figures = run(directory, tokens, rounds, threads)
    _say(
        figures,
        as_json,
        f"tracing changes what a token takes by {figures['traced_cost']:+.1%} and writes "
        f"{figures['events_per_token']:.0f} events for it",
    )


@click.command("decode")
@click.argument("directory", metavar="DIR", type=PATH)
@click.option("--device", default="cuda", show_default=True, help="A torch device.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(GRAPHS),
    help="Graph modes to time, or oracle to compare their bits.  [default: off, on and token; off "
    "alone on a CPU]",
)
@click.option(
    "--tokens", default=64, show_default=True, type=ROUNDS, help="Tokens a figure is the median of."
)
@click.option(
    "--missing",
    type=SHARE,
    default=0.1,
    show_default=True,
    help="Share of a token's experts that is missing.",
)
@click.option("--readers", default=4, show_default=True, type=READERS, help="Reader processes.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def decode_command(
    directory: Path,
    device: str,
    modes: tuple[str, ...],
    tokens: int,
    missing: float,
    readers: int,
    as_json: bool,
) -> None:
    """What a token takes on a GPU, over the checkpoint in DIR, against what its bytes take.

    With every expert in device memory, with some missing there but in the arena, and with some
    missing in both. All experts must fit on the device: headrace synth DIR --preset wide --layers
    40 --experts 12 --vocab 129280 has the released widths in 20 GB.
    """
    from launch.bench.decode import run

    chosen = modes or (("off",) if device == "cpu" else ("off", "on", "token"))
    figures = run(directory, device, chosen, tokens, missing, readers)
    if as_json:
        click.echo(json.dumps(figures, indent=2))
        return
    if figures["floor_ms"]:
        click.echo(
            f"{figures['device']}: {figures['hbm_gb_s']:.0f} GB/s, a token reads "
            f"{figures['bytes_per_token'] / 1e9:.2f} GB: floor {figures['floor_ms']:.2f} ms"
        )
    for mode, of in figures["modes"].items():
        if mode == "oracle":
            click.echo(f"oracle: {of['differences']} differences in {of['compared']} tokens")
            continue
        # On a CPU there are none to count.
        calls = f", {of['launches']} launches, {of['syncs']} waits" if of["launches"] else ""
        click.echo(
            f"graphs {mode}: {of['resident_ms']:.2f} ms all resident ({of['host_ms']:.2f} of the "
            f"host{calls}), {of['from_arena_ms']:.2f} ms "
            f"with {missing:.0%} from the arena, {of['from_disk_ms']:.1f} ms with them from disk"
        )
    for row in figures["modes"][chosen[-1]].get("kernels", [])[:20]:
        click.echo(f"{row['us']:9.1f} us {row['calls']:5d} x {row['kernel']}")


@click.command("prefill")
@of_checkpoint
@click.option(
    "--device",
    default=ENGINE.device,
    show_default=True,
    help="A torch device; auto: a GPU where there is one.",
)
@click.option(
    "--tokens",
    "lengths",
    multiple=True,
    type=COUNT,
    help="Length of a prompt; may be given again.  [default: 128, 1024 and 8192; 32 and 128 on a "
    "CPU]",
)
@click.option(
    "--chunk-tokens",
    type=Integer(1, 1 << 16),
    help="Prompt tokens computed in one pass.  [default: the engine's on this device]",
)
@click.option(
    "--passes",
    default=5,
    show_default=True,
    type=ROUNDS,
    help="Prefills a figure is the median of, fewer where they take over five seconds.",
)
@click.option("--readers", default=4, show_default=True, type=READERS, help="Reader processes.")
@as_json_option
def prefill_command(
    directory: Path,
    device: str,
    lengths: tuple[int, ...],
    chunk_tokens: int | None,
    passes: int,
    readers: int,
    as_json: bool,
) -> None:
    """What a prompt's first pass takes, over the checkpoint in DIR, against what it has to do.

    The floor is the sum over layers of what takes longer, reading its bytes or computing its
    products, at the rates that this device reaches. Prompts run with every expert on the device,
    and with every expert in the arena only. All experts must fit on the device and in memory:
    headrace synth DIR --preset wide --layers 8 --experts 16 has the released widths in 5 GB.
    """
    from launch.bench.prefill import run

    with ended_by_signals():
        figures = run(directory, device, lengths, chunk_tokens, passes, readers)
    if as_json:
        click.echo(json.dumps(figures, indent=2))
        return
    click.echo(
        f"{figures['device']}: {figures['hbm_gb_s']:.0f} GB/s, {figures['tflops']:.3g} TFLOP/s"
        + (f", {figures['copy_gb_s']:.1f} GB/s from the host" if figures["copy_gb_s"] else "")
    )
    for of in figures["prompts"]:
        _say_prefill(of)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _say_prefill(of: dict[str, Any]) -> None:
    memory = f", {of['peak_bytes'] / 1e9:.2f} GB beyond the weights" if of["peak_bytes"] else ""
    click.echo(
        f"{_count(of['tokens'], 'token')} in {_count(of['chunks'], 'chunk')}, "
        f"{of['experts']} experts, "
        f"{of['bytes'] / 1e9:.3g} GB and {of['flops'] / 1e12:.3g} TFLOP: "
        f"floor {of['floor_ms']:.2f} ms; {of['resident_ms']:.1f} ms all resident "
        f"({of['resident_tokens_per_s']:.0f} tokens/s, {of['ratio']:.1f} x floor), "
        f"{of['from_arena_ms']:.1f} ms from the arena{memory}"
    )
    if of["kernels"]:
        click.echo(f"the device worked {of['device_ms']:.1f} ms of a pass:")
    for row in of["kernels"][:KERNELS_SHOWN]:
        name = row["kernel"][:KERNEL_NAME_WIDTH]
        click.echo(f"{row['us']:11.1f} us {row['share']:6.1%} {row['calls']:6d} x {name}")
