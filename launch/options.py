"""What a user can choose: one frozen dataclass for the group, one for a request.

Owns defaults and the checks that need no checkpoint. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from expert_io.policies import DEFAULT_POLICY
from protocol.busy_poll import busy_poll_seconds
from protocol.errors import UsageError
from protocol.faults import FaultPlan
from protocol.messages import Generate
from protocol.specs import GRAPHS

GIB = 1 << 30
CPU_CHUNK_TOKENS = 2048
GPU_CHUNK_TOKENS = 8192
# What a field may hold, the least and the most.
BOUNDS: dict[str, tuple[float, float]] = {
    "readers": (1, 256),
    "piece_bytes": (4096, GIB),
    "predict_ahead": (1, 3),
    "predicted_in_flight": (0, 1024),
    "engram_reads": (1, 4096),
    "chunk_tokens": (1, 1 << 16),
    "max_context": (1, 1 << 40),
    "kept_bytes": (0, 1 << 60),
    "snapshot_bytes": (0, 1 << 60),
    "threads": (0, 1024),
    "seed": (0, (1 << 63) - 1),
    # The shortest wait that a start or a byte could ever take, and a year.
    "start_timeout": (0.001, 3e7),
    "stall_timeout": (0.001, 3e7),
    "order_timeout": (0.001, 3e7),
    "silence_timeout": (0.1, 3e7),
    "slots": (0, 1 << 40),
    "cache_bytes": (0, 1 << 60),
    "device_cache": (0, 1 << 60),
    "disk_bandwidth": (0, 10**15),
    "disk_latency": (0, 3600),
}
# Options that are not written like the field they set.
_SPELLINGS = {"predicted_in_flight": "prefetch", "kept_bytes": "keep"}


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How the process group runs.

    `slots`, `cache_bytes` or `cache_share` (of all experts) size the arena, the first one given;
    none lets memory decide. `pin` is `auto` (pinned where a GPU reads the arena), `on` (refused
    where the machine does not allow it) or `off`. Likely experts of
    each of the next `predict_ahead` layers are published, of each layer once more before its
    attention where `predict_early` is set, and at most `predicted_in_flight` are read ahead at
    once; 0 turns prefetch off.
    `graphs` and `device_cache` matter on a GPU: how decode steps are launched, and bytes of its
    memory for experts (None: what is free).
    `chunk_tokens` of a prompt are computed in one pass (None: `pass_tokens` says).
    `kept_bytes` bound the sequence states that let a request continue an earlier one;
    `snapshot_dir` keeps them beyond the process, within `snapshot_bytes`.
    For `busy_poll` seconds a process that is likely to be needed waits without sleeping (None: as
    this machine's cores allow).
    """

    checkpoint: Path
    device: str = "auto"
    readers: int = 4
    cache_bytes: int | None = None
    cache_share: float | None = None
    slots: int | None = None
    pin: str = "auto"
    graphs: str = "token"
    device_cache: int | None = None
    direct: bool = True
    piece_bytes: int = 4 << 20
    pack: Path | None = None
    pinned: tuple[tuple[int, int], ...] = ()
    warm_dir: Path | None = None
    policy: str = DEFAULT_POLICY
    predict_ahead: int = 1
    predict_early: bool = False
    predicted_in_flight: int = 2
    engram_reads: int = 128
    engram_cache_bytes: int = 64 << 20
    chunk_tokens: int | None = None
    max_context: int = 32768
    kept_bytes: int = 256 << 20
    snapshot_dir: Path | None = None
    snapshot_bytes: int = 4 * GIB
    seed: int = 0
    threads: int = 0
    verify_slots: bool = False
    start_timeout: float = 600.0
    stall_timeout: float = 60.0
    order_timeout: float = 20.0
    silence_timeout: float = 300.0
    busy_poll: float | None = None
    runtime_dir: Path | None = None
    trace: Path | None = None
    route_trace: Path | None = None
    route_trace_inputs: bool = False
    disk_bandwidth: int = 0
    disk_latency: float = 0.0
    reader_faults: str = ""
    engram_faults: str = ""

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            # Written so that it is false for a value that is no number at all.
            if value is not None and not least <= value <= most:
                option = _SPELLINGS.get(name, name.replace("_", "-"))
                bound = f"at most {most:g}" if value > most else f"at least {least}"
                raise UsageError(f"--{option} is {value}, expected {bound}")
        for faults in (self.reader_faults, self.engram_faults):
            FaultPlan.parse(faults)
        check_device(self.device)
        if self.route_trace_inputs and self.route_trace is None:
            raise UsageError("--route-trace-inputs needs --route-trace FILE, to go beside it")
        if self.pin not in ("auto", "on", "off"):
            raise UsageError(f"--pin is {self.pin!r}, expected auto, on or off")
        if self.graphs not in GRAPHS:
            raise UsageError(f"--graphs is {self.graphs!r}, expected {', '.join(GRAPHS)}")

    @property
    def busy_poll_seconds(self) -> float:
        """`busy_poll`, or what the cores that this process may use allow."""
        if self.busy_poll is not None:
            return self.busy_poll
        cores = len(os.sched_getaffinity(0))
        # On a CPU they all compute, unless told otherwise.
        threads = 1 if on_gpu(self.device) else self.threads or cores
        return busy_poll_seconds(cores, self.readers, threads)

    @property
    def pass_tokens(self) -> int:
        """Prompt tokens of one pass: `chunk_tokens`, or as many as the device is given by itself.

        Every pass of more than some hundred tokens reads nearly every expert, whatever their
        number; what a pass needs besides, some 0.5 MB a token at the released widths, a GPU has
        room for. A CPU's own work outweighs the reads from about its number on.
        """
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        return GPU_CHUNK_TOKENS if on_gpu(self.device) else CPU_CHUNK_TOKENS


def on_gpu(device: str) -> bool:
    """Whether compute will hold its weights on a GPU (asked without loading torch)."""
    return device.startswith("cuda") or (device == "auto" and Path("/dev/nvidiactl").exists())


def check_device(name: str) -> None:
    """Raises UsageError for what no process could compute on, whatever the machine has."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name):
        raise UsageError(
            f"--device is {name!r}, expected auto, cpu, cuda, or cuda:N for one of many"
        )


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One request: token ids to continue and how to choose; see `protocol.messages.Generate`."""

    prompt: list[int]
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None

    def message(self, request: int) -> Generate:
        """This as request number `request`."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        return Generate(request, **{**chosen, "stop": list(self.stop)})


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", 1)}
# More would be no machine's memory, and at some length no float.
_MOST_DIGITS = 30


def parse_size(text: str) -> int:
    """Bytes in `4GiB`, `500MB` or `1048576`; raises UsageError."""
    matched = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if matched is None or matched[2] not in _UNITS or len(matched[1]) > _MOST_DIGITS:
        raise UsageError(f"{text!r} is not a size; write it like 64GiB, 500MB or 1048576")
    return int(float(matched[1]) * _UNITS[matched[2]])


class Cache(NamedTuple):
    """Bytes, or a share of all experts; `str` writes it as `parse_cache` reads it."""

    nbytes: int | None = None
    share: float | None = None

    def __str__(self) -> str:
        return str(self.nbytes) if self.share is None else f"{100 * self.share:g}%"


def parse_cache(text: str) -> Cache:
    """A size such as 64GiB or a percentage; raises UsageError."""
    matched = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if matched is None or len(matched[1]) > _MOST_DIGITS:
        return Cache(nbytes=parse_size(text))
    return Cache(share=float(matched[1]) / 100)


def format_size(count: float) -> str:
    """`count` bytes in the largest binary unit that keeps it above 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
