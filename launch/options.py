"""What a user can choose: one frozen dataclass for the group, one for a request.

Owns defaults and the checks that need no checkpoint. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from protocol.errors import UsageError
from protocol.messages import Generate

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How the process group runs.

    `slots`, `cache_bytes` or `cache_share` (of all experts) size the arena, the first one given;
    none lets memory decide. `pin` is `auto` (pinned where a GPU reads the arena), `on` (refused
    where the machine does not allow it) or `off`. `predict` experts of the next layer are published
    and at most `predicted_in_flight` are read ahead at once; 0 turns prefetch off.
    `kept_bytes` bound the sequence states that let a request continue an earlier one;
    `snapshot_dir` keeps them beyond the process, within `snapshot_bytes`.
    """

    checkpoint: Path
    device: str = "auto"
    readers: int = 4
    cache_bytes: int | None = None
    cache_share: float | None = None
    slots: int | None = None
    pin: str = "auto"
    direct: bool = True
    piece_bytes: int = 4 << 20
    pack: Path | None = None
    policy: str = "lru-random"
    predict: int = 6
    predicted_in_flight: int = 2
    engram_reads: int = 128
    engram_cache_bytes: int = 64 << 20
    chunk_tokens: int = 512
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
    runtime_dir: Path | None = None
    trace: Path | None = None
    route_trace: Path | None = None
    route_trace_inputs: bool = False
    disk_bandwidth: float = 0.0
    disk_latency: float = 0.0
    reader_faults: str = ""
    engram_faults: str = ""

    def __post_init__(self) -> None:
        for name, least in (
            ("readers", 1),
            ("piece_bytes", 4096),
            ("predict", 0),
            ("predicted_in_flight", 0),
            ("engram_reads", 1),
            ("chunk_tokens", 1),
            ("max_context", 1),
            ("kept_bytes", 0),
            ("snapshot_bytes", 0),
            ("threads", 0),
        ):
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is {getattr(self, name)}, expected at least {least}")
        if self.pin not in ("auto", "on", "off"):
            raise UsageError(f"--pin is {self.pin!r}, expected auto, on or off")


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


def parse_size(text: str) -> int:
    """Bytes in `4GiB`, `500MB` or `1048576`; raises UsageError."""
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if matched is None or matched[2] not in _UNITS:
        raise UsageError(f"{text!r} is not a size; write it like 64GiB, 500MB or 1048576")
    return int(float(matched[1]) * _UNITS[matched[2]])


def parse_cache(text: str) -> tuple[int | None, float | None]:
    """(bytes, None) for a size or (None, share) for a percentage; raises UsageError."""
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    return (None, float(matched[1]) / 100) if matched else (parse_size(text), None)


def format_size(count: float) -> str:
    """`count` bytes in the largest binary unit that keeps it above 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
