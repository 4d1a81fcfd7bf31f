"""How much memory the machine gives, and how many expert slots fit into it.

Owns the plan of the arena; allocates nothing. Sizes are bytes.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.options import GIB, Cache, GroupOptions, format_size, on_gpu
from protocol.config import ModelConfig
from protocol.errors import ResourceError, UsageError
from protocol.tensor_table import expected_tensors, kind_of

# Left to the system, the processes themselves, KV and the page cache; more cache than that made
# engines of this kind slower, since the system began to page.
RESERVE = 2 * GIB
# Of what remains, the share a cache takes when the user names none.
DEFAULT_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`slots` of `slot_bytes`; `dense_bytes` is what compute loads beside it into memory;
    `all_experts` slots would be enough for never reading twice."""

    slots: int
    slot_bytes: int
    dense_bytes: int
    all_experts: int

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena."""
        return self.slots * self.slot_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arena and the dense weights beside it."""
        return self.arena_bytes + self.dense_bytes


def plan_memory(config: ModelConfig, options: GroupOptions, slot_bytes: int) -> MemoryPlan:
    """Size the arena of `slot_bytes` slots.

    Raises UsageError for fewer slots than that, ResourceError where memory does not suffice.
    """
    every = config.num_hidden_layers * config.n_routed_experts
    in_flight = in_flight_slots(config)
    least = minimum_slots(config, in_flight)
    dense = 0 if on_gpu(options.device) else dense_bytes(config)
    available = available_memory()
    if options.slots is not None:
        slots, asked = options.slots, f"--slots {options.slots}"
    elif options.cache_bytes is not None:
        slots = options.cache_bytes // slot_bytes
        asked = f"--cache {format_size(options.cache_bytes)} ({slots} slots)"
    elif options.cache_share is not None:
        slots = math.ceil(options.cache_share * every)
        asked = f"--cache {Cache(share=options.cache_share)} ({slots} slots)"
    else:
        room = (available - dense - RESERVE) * DEFAULT_SHARE
        slots = max(least, min(math.floor(room / slot_bytes), every + in_flight))
        asked = f"the smallest cache ({slots} slots)"
    if slots < least:
        raise UsageError(
            f"{asked} is too small: one token needs {least} slots "
            f"({format_size(least * slot_bytes)}); give at least --slots {least}"
        )
    plan = MemoryPlan(min(slots, every + in_flight), slot_bytes, dense, every)
    if plan.memory_bytes > available:
        raise ResourceError(
            f"{asked} with the dense weights needs {format_size(plan.memory_bytes)}, "
            f"{format_size(available)} of memory are available; ask for a smaller --cache"
        )
    _check_pin(options, plan)
    return plan


def minimum_slots(config: ModelConfig, in_flight: int) -> int:
    """The fewest slots that can serve a token: its experts and what is in flight."""
    return config.num_hidden_layers * config.num_experts_per_tok + in_flight


def in_flight_slots(config: ModelConfig) -> int:
    """Slots beside one token's own: the free reserve and as many experts being read."""
    return 2 * config.num_experts_per_tok


def dense_bytes(config: ModelConfig) -> int:
    """Bytes of memory that a CPU's dense weights take: fp32, but for the embedding's bf16."""
    elements = {
        name: math.prod(spec.shape)
        for name, spec in expected_tensors(config).items()
        if kind_of(name) == "dense" and not name.endswith(".scale")
    }
    return 4 * sum(elements.values()) - 2 * elements["embed.weight"]


def available_memory() -> int:
    """What this process group may still take: the machine's, or its control group's if less."""
    available = _meminfo("MemAvailable")
    for limit, used in _cgroup_limits():
        available = min(available, limit - used)
    return max(0, available)


def _meminfo(key: str) -> int:
    kibibytes = _count(Path("/proc/meminfo"), f"{key}:")
    if kibibytes is not None:
        return kibibytes * 1024
    raise ResourceError(f"/proc/meminfo has no {key}; Headrace needs Linux 3.14 or later")


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory, in this one's control group, or
    on this machine where the group does not say. Counted before the killed one is gone."""
    for version_2, directory in _memory_groups():
        file = directory / ("memory.events" if version_2 else "memory.oom_control")
        count = _count(file, "oom_kill")
        if count is not None:
            return count
    return _count(Path("/proc/vmstat"), "oom_kill") or 0


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, in use) of every control group above this process that has a limit."""
    found = []
    for version_2, directory in _memory_groups():
        names = (
            ("memory.max", "memory.current")
            if version_2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        limit, used = (_number(directory / name) for name in names)
        if limit is not None and used is not None:
            found.append((limit, used))
    return found


def _memory_groups() -> Iterator[tuple[bool, Path]]:
    """(whether it is of version 2, directory) of this process's control groups that may account for
    memory, each followed by those above it."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        version_2 = controllers == ""
        if not version_2 and "memory" not in controllers.split(","):
            continue
        top = root if version_2 else root / "memory"
        group = top / inside.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(top):
                break
            yield version_2, directory


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # absent, or the word "max"


def _count(path: Path, key: str) -> int | None:
    """The number in the line `KEY NUMBER …` of `path`; None where there is no such line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    words = (line.split() for line in lines)
    return next((int(pair[1]) for pair in words if pair[:1] == [key]), None)


def _check_pin(options: GroupOptions, plan: MemoryPlan) -> None:
    if options.pin != "on":
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and plan.arena_bytes > soft:
        raise ResourceError(
            f"--pin on needs {format_size(plan.arena_bytes)} of locked memory, RLIMIT_MEMLOCK "
            f"allows {format_size(soft)}; raise it (ulimit -l unlimited, LimitMEMLOCK=infinity for "
            "systemd, --ulimit memlock=-1 for docker) or use --pin off"
        )
