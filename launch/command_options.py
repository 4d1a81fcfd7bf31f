"""The options that every command with a process group takes, and how they become GroupOptions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from expert_io.policies import POLICIES
from launch.options import (
    BOUNDS,
    CPU_CHUNK_TOKENS,
    GPU_CHUNK_TOKENS,
    Cache,
    GroupOptions,
    format_size,
)
from launch.ranges import CACHE, PATH, Finite, Integer, Size
from launch.warm_options import EXPERTS
from protocol.specs import GRAPHS

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(GroupOptions)}


def _option(
    *names: str, key: str, help: str, kind: Callable[..., Any] | None = None, **extra: Any
) -> Callable[[Any], Any]:
    """The option that sets field `key`; with `kind`, of what BOUNDS says that it may hold."""
    if kind is not None:
        extra["type"] = kind(*BOUNDS[key])
    extra = {"default": _DEFAULTS[key], "show_default": True, **extra}
    return click.option(*names, key, help=help, **extra)


_OPTIONS = (
    click.option(
        "--cache",
        type=CACHE,
        metavar="SIZE",
        help="Memory for experts: 64GiB, or 25% of all experts.  [default: what memory allows]",
    ),
    _option(
        "--slots",
        key="slots",
        kind=Integer,
        help="The same as a number of experts; wins over --cache.",
    ),
    _option("--device", key="device", help="cpu, cuda, or auto: the GPU if there is one."),
    _option("--readers", key="readers", kind=Integer, help="Reader processes."),
    _option(
        "--prefetch",
        key="predicted_in_flight",
        kind=Integer,
        metavar="N",
        help="Predicted experts being read at once; 0 turns prefetch off.",
    ),
    _option(
        "--predict-ahead",
        key="predict_ahead",
        kind=Integer,
        metavar="LAYERS",
        help="How many layers ahead experts are predicted: farther pays on slow disks.",
    ),
    _option(
        "--predict-early/--no-predict-early",
        key="predict_early",
        help="Predict a layer's experts again before its attention, where cores are free for it; a "
        "GPU's decode does not.",
    ),
    _option(
        "--policy",
        key="policy",
        type=click.Choice(sorted(POLICIES)),
        help="Which expert gives up its slot.",
    ),
    click.option(
        "--pin-experts",
        "pinned",
        default="",
        type=EXPERTS,
        metavar="LIST",
        help="Experts that stay in the cache: 3:17,5:0-7 for one of layer 3, eight of layer 5.",
    ),
    _option(
        "--chunk-tokens",
        key="chunk_tokens",
        kind=Integer,
        help="Prompt tokens computed in one pass, which reads each needed expert once.  [default: "
        f"{CPU_CHUNK_TOKENS}, on a GPU {GPU_CHUNK_TOKENS}]",
    ),
    _option(
        "--max-context", key="max_context", kind=Integer, help="Longest sequence, prompt included."
    ),
    _option(
        "--pin",
        key="pin",
        type=click.Choice(["auto", "on", "off"]),
        help="Lock the expert memory; auto: only where a GPU reads it.",
    ),
    _option(
        "--graphs",
        key="graphs",
        type=click.Choice(GRAPHS),
        help="How a GPU launches decode steps: one by one, captured a layer at a time, captured as "
        "one, or all ways and compared.",
    ),
    _option(
        "--device-cache",
        key="device_cache",
        kind=Size,
        metavar="SIZE",
        help="GPU memory for experts; 0 reads them where they lie.  [default: what is free]",
    ),
    _option("--direct/--buffered", key="direct", help="Read with O_DIRECT where it works."),
    click.option(
        "--pack",
        type=PATH,
        help="Read experts from this copy that headrace pack made.",
    ),
    _option("--threads", key="threads", kind=Integer, help="torch threads on the CPU; 0: its own."),
    _option(
        "--start-timeout", key="start_timeout", kind=Finite, help="Seconds the start may take."
    ),
    _option(
        "--stall-timeout",
        key="stall_timeout",
        kind=Finite,
        help="Seconds compute waits for a byte before the request fails.",
    ),
    _option(
        "--silence-timeout",
        key="silence_timeout",
        kind=Finite,
        help="Seconds a process may give no sign of life before it is killed and all ends.",
    ),
    _option(
        "--keep",
        key="kept_bytes",
        kind=Size,
        show_default=format_size(_DEFAULTS["kept_bytes"]),
        metavar="SIZE",
        help="Memory for sequence states that later requests continue from; 0 keeps none.",
    ),
    click.option(
        "--runtime-dir",
        type=PATH,
        help="Where the sockets' private directory goes.  [default: $XDG_RUNTIME_DIR or /tmp]",
    ),
    click.option(
        "--route-trace",
        type=PATH,
        help="Record routes and predictions here, for headrace simulate and headrace fit.",
    ),
    _option(
        "--route-trace-inputs",
        key="route_trace_inputs",
        is_flag=True,
        help="Record activations too, in FILE.inputs: what headrace fit learns from.",
    ),
    _option(
        "--verify-slots",
        key="verify_slots",
        is_flag=True,
        help="For developers: check that no slot changes under compute.",
    ),
    _option(
        "--piece",
        key="piece_bytes",
        kind=Size,
        show_default=format_size(_DEFAULTS["piece_bytes"]),
        metavar="SIZE",
        help="For developers: most bytes of one read, and so what an urgent one waits for.",
    ),
    _option(
        "--disk-bandwidth",
        key="disk_bandwidth",
        kind=Size,
        metavar="BYTES/S",
        help="For developers: slow the disk down to this.",
    ),
    _option(
        "--disk-latency",
        key="disk_latency",
        kind=Finite,
        metavar="SECONDS",
        help="For developers: add this to every read.",
    ),
    _option(
        "--reader-faults",
        key="reader_faults",
        help="For developers: break reads on purpose, as protocol/faults.py describes.",
    ),
    _option(
        "--engram-faults", key="engram_faults", help="For developers: the same for engram rows."
    ),
)


def with_group_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options and a DIR argument; the function gets `group: GroupOptions` instead."""

    @functools.wraps(function)
    def collect(directory: Path, cache: Cache | None, **arguments: Any) -> Any:
        names = {field.name for field in fields(GroupOptions)}
        chosen = {name: arguments.pop(name) for name in list(arguments) if name in names}
        cache_bytes, cache_share = cache or Cache()
        group = GroupOptions(directory, cache_bytes=cache_bytes, cache_share=cache_share, **chosen)
        return function(group=group, **arguments)

    for option in reversed(_OPTIONS):
        collect = option(collect)
    return click.argument("directory", metavar="DIR", type=PATH)(collect)
