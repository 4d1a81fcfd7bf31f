"""Symptoms: a slot rewritten while it is read, a tiny arena that deadlocks, a wait without an end,
a hit that costs a message, an expert computed twice or never."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from protocol import counters
from protocol.errors import HeadraceError, ReadError, StallError
from protocol.layouts import Progress
from tests.ipc.compute_side import ExpertRig, mini_config, resident, same_bytes

EXPERTS = mini_config().n_routed_experts
LAYERS = mini_config().num_hidden_layers


def fetch_all(rig: ExpertRig, layer: int, experts: list[int], pause: float = 0.0) -> list[int]:
    """Fetch and compare every byte, slowly if asked to; the order of arrival."""
    expected = dict(resident().fetch(layer, experts))
    order = []
    for expert, found in rig.experts.fetch(layer, experts):
        if pause:
            time.sleep(pause)
        assert same_bytes(found, expected[expert]), f"layer {layer} expert {expert}"
        order.append(expert)
    rig.experts.release()
    return order


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 24])
def test_any_arena_serves_a_whole_layer_and_reads_the_right_bytes(slots: int):
    """16 experts of each layer through an arena that may hold a single one."""
    with ExpertRig(slots, restless=0.3, reserve=0 if slots == 1 else 1) as rig:
        for layer in (0, 3, 0, 7):
            assert sorted(fetch_all(rig, layer, list(range(EXPERTS)))) == list(range(EXPERTS))


def stress(rig: ExpertRig, steps: int) -> None:
    """Overlapping picks of two layers, so that much is a hit that the service may evict."""
    chance = random.Random(11)
    for step in range(steps):
        picks = sorted(chance.sample(range(6), 4))
        order = fetch_all(rig, step // 3 % 2, picks, pause=chance.random() * 0.002)
        assert sorted(order) == picks


def test_no_slot_is_rewritten_while_it_is_read():
    """A restless service, slow reads, a slow reader of slots: every byte and generation checked."""
    with ExpertRig(8, restless=0.2, delay=0.001) as rig:
        stress(rig, 200)
        assert rig.experts.counts[counters.DEMAND_HITS] > 100
        assert rig.experts.counts[counters.DEMAND_MISSES] > 100


def test_the_stress_above_sees_a_service_that_ignores_the_epoch():
    with (
        ExpertRig(8, restless=0.2, ignore_epoch=True) as rig,
        pytest.raises((HeadraceError, AssertionError), match=r"was rewritten|layer \d+ expert"),
    ):
        stress(rig, 200)


def test_a_hit_sends_nothing_and_moves_the_epoch():
    with ExpertRig(20, reserve=0) as rig:
        picks = [1, 4, 9]
        fetch_all(rig, 2, picks)
        demands = rig.messages("Demand")
        epoch = int(rig.progress.words[Progress.EPOCH])
        assert fetch_all(rig, 2, picks) == picks
        # The service takes what is sent before this and so has logged it.
        fetch_all(rig, 3, [0])
        assert len(rig.messages("Demand")) == len(demands) + 1
        assert int(rig.progress.words[Progress.EPOCH]) > epoch
        assert rig.experts.counts[counters.DEMAND_HITS] == 3
        assert rig.experts.counts[counters.DEMAND_MISSES] == 4


def test_what_is_here_comes_before_what_is_missing():
    with ExpertRig(20, reserve=0, delay=0.01) as rig:
        fetch_all(rig, 1, [5, 7])
        order = fetch_all(rig, 1, [0, 5, 6, 7])
        assert order[:2] == [5, 7] and sorted(order[2:]) == [0, 6]


def test_what_is_missing_is_asked_for_before_the_first_item_is_drawn():
    with ExpertRig(20, reserve=0) as rig:
        fetch_all(rig, 1, [5])
        drawn_later = rig.experts.fetch(1, [5, 7])
        rig.experts.hint(1, [5, 7], None, [], [])
        assert [expert for expert, _ in drawn_later] == [5, 7]
        rig.experts.release()
        # The service takes what is sent before this and so has logged it.
        fetch_all(rig, 3, [0])
        said = rig.log.read_text(encoding="utf-8").splitlines()
        asked = next(i for i, line in enumerate(said) if "experts=[7]" in line)
        hinted = next(i for i, line in enumerate(said) if line.startswith("Hint("))
        assert asked < hinted


def test_finished_demands_lose_their_protection():
    with ExpertRig(6) as rig:
        fetch_all(rig, 0, [0, 1, 2])
        assert int(rig.progress.words[Progress.DEMAND_DONE]) == rig.experts._last_demand > 0


def test_an_abandoned_fetch_gives_everything_back():
    with ExpertRig(4, delay=0.002) as rig:
        for layer in range(LAYERS):
            arrivals = rig.experts.fetch(layer, list(range(EXPERTS)))
            next(arrivals)
            rig.experts.release()
            assert int(rig.progress.words[Progress.DEMAND_DONE]) == rig.experts._last_demand
        assert len(fetch_all(rig, 0, list(range(EXPERTS)))) == EXPERTS


def test_a_silent_service_is_a_named_stall_and_is_asked_again():
    with ExpertRig(8, silent=True, stall_timeout=1.5) as rig:
        begin = time.monotonic()
        with pytest.raises(StallError, match=r"layer 5: experts 2, 11 did not come within 1\.5"):
            list(rig.experts.fetch(5, [2, 11]))
        assert 1.4 < time.monotonic() - begin < 4
        rig.experts.release()
        assert len(rig.messages("Demand")) == 2
        assert rig.experts.counts[counters.STALL_EXPERT_S] >= 1.5


def test_a_stopped_service_does_not_stop_the_heartbeat_or_the_epoch():
    """While compute waits it is alive and holds nothing."""
    with ExpertRig(8, stall_timeout=0.5) as rig:
        rig.process.send_signal(signal.SIGSTOP)
        before = rig.progress.words.copy()
        with pytest.raises(StallError):
            list(rig.experts.fetch(5, [2]))
        rig.process.send_signal(signal.SIGCONT)
        after = rig.progress.words
        assert after[Progress.EPOCH] - before[Progress.EPOCH] > 20
        assert after[Progress.HEARTBEAT] - before[Progress.HEARTBEAT] > 400_000_000
        rig.experts.release()
        # A late answer to the demand given up does no harm.
        assert fetch_all(rig, 5, [2, 3]) in ([2, 3], [3, 2])


def test_a_failed_read_names_the_expert_and_the_next_fetch_works():
    with ExpertRig(8, fail=[3, 9, 1]) as rig:
        with pytest.raises(ReadError, match="layer 3 expert 9: shard 7: Input/output error"):
            list(rig.experts.fetch(3, [1, 9]))
        rig.experts.release()
        assert sorted(fetch_all(rig, 3, [1, 9])) == [1, 9]


def test_hints_carry_the_step_and_are_dropped_rather_than_waited_for():
    with ExpertRig(8) as rig:
        rig.page.begin_step()
        rig.experts.hint(3, [1, 2], 4, [7, 5], [0.5, 0.25])
        rig.experts.hint(LAYERS - 1, [1], None, [], [])
        fetch_all(rig, 0, [0])
        first, last = rig.messages("Hint")
        assert "step=1, layer=3, picks=[1, 2], predicted_layer=4, predicted=[7, 5]" in first
        assert "predicted_layer=-1, predicted=[], scores=[]" in last
        rig.process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        for _ in range(5000):
            rig.experts.hint(3, list(range(16)), 4, [7, 5], [0.5, 0.25])
        assert time.monotonic() - begin < 5
        assert rig.experts.counts[counters.HINTS_DROPPED] > 0
        rig.process.send_signal(signal.SIGCONT)


def test_a_routing_is_said_again_only_for_an_expert_that_is_absent():
    with ExpertRig(8) as rig:
        rig.page.begin_step()
        fetch_all(rig, 4, [7, 5])
        for _ in range(2):
            rig.experts.hint(3, [1, 2], 4, [7, 5], [0.5, 0.25])
        rig.experts.hint(3, [1, 2], 4, [7, 6], [0.5, 0.25])
        rig.experts.hint(4, [7, 5], 5, [1], [0.5])
        fetch_all(rig, 0, [0])
        said = [line.partition("layer=")[2] for line in rig.messages("Hint")]
        assert [line.partition(", scores")[0] for line in said] == [
            "3, picks=[1, 2], predicted_layer=4, predicted=[7, 5]",
            "3, picks=[1, 2], predicted_layer=4, predicted=[7, 6]",
            "4, picks=[7, 5], predicted_layer=5, predicted=[1]",
        ]


def test_a_wait_is_a_span_with_its_layer(tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    with ExpertRig(8, trace=str(trace), delay=0.1) as rig:
        fetch_all(rig, 6, [1, 2])
        rig.tracer.stop()
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    waits = [event for event in events if event["name"] == "wait for experts"]
    assert waits and all(event["args"]["layer"] == 6 for event in waits)
