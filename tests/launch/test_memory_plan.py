"""Symptoms: a cache that makes the machine page, or cannot hold a token; a limit overlooked."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import memory
from launch.memory import GIB, MemoryPlan, dense_bytes, plan_memory
from launch.options import GroupOptions
from protocol.config import ModelConfig
from protocol.errors import ResourceError, UsageError

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
CONFIG = ModelConfig.load(MINI)
SLOT = 1 << 20
EVERY = 8 * 16
IN_FLIGHT = 2 * 3
LEAST = 8 * 3 + IN_FLIGHT


def _plan(**options: Any) -> MemoryPlan:
    return plan_memory(CONFIG, GroupOptions(MINI, device="cpu", **options), SLOT)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with the bytes of memory that are to be available."""

    def have(available: int) -> None:
        monkeypatch.setattr(memory, "available_memory", lambda: available)

    have(100 * GIB)
    return have


@pytest.mark.parametrize(
    "options, slots",
    [
        ({"slots": 40}, 40),
        ({"cache_bytes": 50 * SLOT}, 50),
        ({"cache_bytes": 51 * SLOT - 1}, 50),
        ({"cache_share": 0.5}, 64),
        ({"slots": 40, "cache_bytes": 50 * SLOT}, 40),
        ({}, EVERY + IN_FLIGHT),
        ({"slots": 10_000}, EVERY + IN_FLIGHT),
        ({"cache_share": 9.0}, EVERY + IN_FLIGHT),
    ],
)
def test_the_cache_is_what_was_asked_for_and_never_more_than_all_experts(
    machine: Any, options: dict[str, Any], slots: int
) -> None:
    assert _plan(**options).slots == slots


def test_the_released_model_needs_240_slots_and_what_is_in_flight(machine: Any) -> None:
    released = replace(CONFIG, num_hidden_layers=40, num_experts_per_tok=6, n_routed_experts=384)
    in_flight = memory.in_flight_slots(released)
    assert memory.minimum_slots(released, in_flight) == 240 + in_flight


@pytest.mark.parametrize(
    "options", [{"slots": LEAST - 1}, {"cache_bytes": LEAST * SLOT - 1}, {"cache_share": 0.2}]
)
def test_a_cache_below_one_token_is_refused_with_the_least(
    machine: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=rf"needs {LEAST} slots \(30\.0 MiB\).*--slots {LEAST}"):
        _plan(**options)
    assert _plan(slots=LEAST).slots == LEAST


def test_a_cache_beyond_memory_is_refused_with_both_numbers(machine: Any) -> None:
    dense = dense_bytes(CONFIG)
    machine(100 * SLOT + dense)
    assert _plan(slots=100).memory_bytes == 100 * SLOT + dense
    machine(100 * SLOT + dense - 1)
    with pytest.raises(ResourceError, match=r"needs 104\.6 MiB, 104\.6 MiB of memory"):
        _plan(slots=100)


def test_the_default_leaves_the_system_its_reserve(machine: Any) -> None:
    machine(memory.RESERVE + dense_bytes(CONFIG) + 100 * SLOT)
    assert _plan().slots == int(100 * memory.DEFAULT_SHARE)


def test_the_default_of_a_small_machine_is_the_least_that_works(machine: Any) -> None:
    machine(memory.RESERVE)
    assert _plan().slots == LEAST
    machine(LEAST * SLOT)
    with pytest.raises(ResourceError, match="the smallest cache"):
        _plan()


def test_on_a_gpu_the_dense_weights_take_no_host_memory(machine: Any) -> None:
    plan = plan_memory(CONFIG, GroupOptions(MINI, device="cuda"), SLOT)
    assert plan.dense_bytes == 0 and plan.memory_bytes == plan.arena_bytes


@contextmanager
def _locked_memory(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_locked_memory_is_checked_only_where_it_was_asked_for(machine: Any) -> None:
    with _locked_memory(1 << 16):
        for pin in ("auto", "off"):
            assert _plan(slots=LEAST, pin=pin).slots == LEAST
        with pytest.raises(ResourceError, match=r"needs 30\.0 MiB .* allows 64\.0 KiB"):
            _plan(slots=LEAST, pin="on")


# --- what the machine has -------------------------------------------------------------------------


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """/proc and /sys as files below a directory: 64 GiB available, no control group."""

    class Below(type(Path())):  # type: ignore[misc]
        def __new__(cls, path: str) -> Any:
            return tmp_path / path.lstrip("/")

    monkeypatch.setattr(memory, "Path", Below)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemFree: 5 kB\nMemAvailable: {64 << 20} kB\n")
    return tmp_path


def _group(files: Path, place: str, **values: str | int) -> None:
    directory = files / "sys/fs/cgroup" / place
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_a_control_group_the_machine_decides(files: Path) -> None:
    assert memory.available_memory() == 64 * GIB


def test_a_containers_limit_counts_less_what_it_uses(files: Path) -> None:
    (files / "proc/self/cgroup").write_text("0::/\n")
    _group(files, ".", memory__max=8 * GIB, memory__current=3 * GIB)
    assert memory.available_memory() == 5 * GIB


def test_the_tightest_limit_above_a_process_counts(files: Path) -> None:
    (files / "proc/self/cgroup").write_text("0::/user/session\n")
    _group(files, "user", memory__max=9 * GIB, memory__current=2 * GIB)
    _group(files, "user/session", memory__max="max", memory__current=1 * GIB)
    assert memory.available_memory() == 7 * GIB


def test_the_limit_of_the_older_hierarchy_counts(files: Path) -> None:
    (files / "proc/self/cgroup").write_text("5:cpu:/a\n3:memory:/a\n")
    _group(files, "memory/a", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=1 * GIB)
    assert memory.available_memory() == 3 * GIB


def test_a_group_beyond_its_limit_has_nothing_rather_than_less(files: Path) -> None:
    (files / "proc/self/cgroup").write_text("0::/\n")
    _group(files, ".", memory__max=GIB, memory__current=2 * GIB)
    assert memory.available_memory() == 0


@pytest.mark.parametrize("version_2", [True, False])
def test_a_kill_in_another_control_group_is_taken_for_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version_2: bool
) -> None:
    ours, above = tmp_path / "above" / "ours", tmp_path / "above"
    ours.mkdir(parents=True)
    monkeypatch.setattr(memory, "_memory_groups", lambda: [(version_2, ours), (version_2, above)])
    name = "memory.events" if version_2 else "memory.oom_control"
    # The machine counts where no group does.
    assert memory.oom_kills() >= 0
    # A group without a counter is told by the one above.
    (above / name).write_text("oom 9\noom_kill 7\noom_group_kill 8\n")
    assert memory.oom_kills() == 7
    (ours / name).write_text("low 1\noom_kill 3\n")
    assert memory.oom_kills() == 3
