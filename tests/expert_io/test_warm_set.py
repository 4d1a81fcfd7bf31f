"""The hot experts kept between runs, and experts that stay: files, options, and real processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from expert_io.warm_set import WarmSet
from launch.bench.expert_group import ExpertGroup
from launch.warm_options import check_pinned, parse_experts
from protocol.config import ModelConfig
from protocol.counters import READS_BACKGROUND
from protocol.errors import CheckpointError, ResourceError, UsageError
from protocol.identity import checkpoint_identity
from protocol.layouts import ABSENT
from tests.ipc.running_group import MINI, PATIENCE_S

CONFIG = ModelConfig.load(MINI)
IDENTITY = "ab" * 16


def warm_set(directory: Path, identity: str = IDENTITY, experts: int = 8) -> WarmSet:
    return WarmSet(directory, identity, 3, experts)


def test_the_most_picked_come_first_and_old_picks_fade(tmp_path: Path) -> None:
    warm = warm_set(tmp_path)
    for step in range(5000):
        warm.picked(step, 0, [1, 2] if step < 400 else [3])
        warm.picked(step, 2, [5] if step % 2 else [6, 5])
    assert warm.hottest(3) == [(2, 5), (0, 3), (2, 6)]
    # 400 old picks against a hundred new ones.
    for step in range(5000, 5100):
        warm.picked(step, 1, [7])
    assert warm.hottest(9)[3] == (1, 7)
    warm.save(4)
    assert warm_set(tmp_path).load() == [(2, 5), (0, 3), (2, 6), (1, 7)]
    assert warm.path.stat().st_mode & 0o777 == 0o600


def test_picks_said_again_count_once_and_later_ones_outweigh_earlier(tmp_path: Path) -> None:
    warm = warm_set(tmp_path)
    for _ in range(3):
        warm.picked(7, 0, [0])
    for step in (8, 9):
        warm.picked(step, 1, [4])
    warm.picked(10, 2, [2])
    assert warm.hottest(3) == [(1, 4), (2, 2), (0, 0)]
    warm.save(3)
    assert (0, 0) in warm_set(tmp_path).load()


def test_weights_that_grow_for_ever_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expert_io.warm_set._RESCALE_AT", 1.5)
    often, plain = warm_set(tmp_path), warm_set(tmp_path)
    for step in range(4000):
        often.picked(step, step % 3, [step % 7])
    monkeypatch.undo()
    for step in range(4000):
        plain.picked(step, step % 3, [step % 7])
    assert often.hottest(21) == plain.hottest(21)


def test_a_short_run_does_not_forget_the_long_one_before(tmp_path: Path) -> None:
    first = warm_set(tmp_path / "new" / "directory")
    for expert in (5, 4, 3):
        first.picked(expert, 1, range(expert))
    first.save(5)
    second = warm_set(tmp_path / "new" / "directory")
    assert len(second.load()) == 5
    second.picked(0, 2, [7])
    second.save(6)
    assert warm_set(tmp_path / "new" / "directory").load() == [(2, 7), *first.hottest(5)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda kept: {**kept, "identity": "0" * 32}, "another checkpoint"),
        (lambda kept: {**kept, "shape": [3, 9]}, "another checkpoint"),
        (lambda kept: {**kept, "experts": [24]}, "damaged"),
        (lambda kept: {**kept, "experts": [1, 1]}, "damaged"),
        (lambda kept: {**kept, "experts": ["1"]}, "damaged"),
        (lambda kept: [], "damaged"),
        (lambda kept: {}, "damaged"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused(
    tmp_path: Path, change: Callable[[dict[str, object]], object], why: str
) -> None:
    warm = warm_set(tmp_path)
    warm.picked(0, 0, [1])
    warm.save(1)
    warm.path.write_text(json.dumps(change(json.loads(warm.path.read_text()))))
    with pytest.raises(CheckpointError, match=why):
        warm_set(tmp_path).load()
    warm.path.write_bytes(b"\xff\x00{")
    with pytest.raises(CheckpointError, match="damaged"):
        warm_set(tmp_path).load()


def test_a_pipe_in_its_place_is_waited_for(tmp_path: Path) -> None:
    warm = warm_set(tmp_path)
    os.mkfifo(warm.path)
    with pytest.raises(CheckpointError, match="not a file"):
        warm.load()


def test_nothing_is_left_where_it_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    warm = warm_set(tmp_path / "file")
    warm.picked(0, 0, [1])
    with pytest.raises(ResourceError, match="next start is cold"):
        warm.save(1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    taken = warm_set(tmp_path / "new")
    taken.path.mkdir(parents=True)
    taken.picked(0, 0, [1])
    with pytest.raises(ResourceError, match="next start is cold"):
        taken.save(1)
    assert list((tmp_path / "new").iterdir()) == [taken.path]


def test_a_run_that_picked_nothing_keeps_what_was_there(tmp_path: Path) -> None:
    warm = warm_set(tmp_path)
    warm.picked(0, 0, [1])
    warm.save(1)
    warm_set(tmp_path).save(1)
    assert warm_set(tmp_path).load() == [(0, 1)]


def test_pinned_experts_are_named_in_ranges_and_checked() -> None:
    assert parse_experts("3:17, 5:0-2,3:17") == ((3, 17), (5, 0), (5, 1), (5, 2))
    assert parse_experts("") == ()
    for text in ("3", "3:", "a:1", "1:2-", "1;2"):
        with pytest.raises(UsageError, match="LAYER:EXPERT"):
            parse_experts(text)
    check_pinned(parse_experts("7:0-7"), CONFIG, 32)
    for text, slots in (("8:0", 64), ("0:16", 64), ("0:0-8", 32)):
        with pytest.raises(UsageError, match="--pin-experts"):
            check_pinned(parse_experts(text), CONFIG, slots)


def resident(group: ExpertGroup) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in zip(*(group.directory.entry != ABSENT).nonzero())}  # noqa: B905


def until(group: ExpertGroup, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        group.bump_epoch()
        group.stats()


def test_the_next_start_reads_what_was_hot_and_pinned_experts_stay(tmp_path: Path) -> None:
    hot = {(2, 3), (2, 4), (6, 1)}
    with ExpertGroup(MINI, slots=10, readers=1, warm_dir=tmp_path) as group:
        group.fetch(2, [3, 4])
        group.hint(1, 2, [3, 4], -1, [])
        group.hint(1, 6, [1], -1, [])
        group.stats()
        group.stop()
        group.bury("experts")
    assert (tmp_path / f"{checkpoint_identity(MINI)}.json").exists()
    pinned = [(0, 15), (7, 0)]
    with ExpertGroup(MINI, slots=10, readers=1, warm_dir=tmp_path, pinned=pinned) as group:
        until(group, lambda: resident(group) == {*hot, *pinned})
        assert group.stats()[READS_BACKGROUND] == 5
        for layer in range(8):
            group.hint(2 + layer, layer, [5, 6, 7], -1, [])
            group.fetch(layer, [5, 6, 7])
        assert {*pinned} < resident(group) and not hot & resident(group)
