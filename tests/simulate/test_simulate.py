"""Symptoms: prefetch that loses, a simulator that is not the service, a policy beyond the bound."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from expert_io.belady import Belady
from expert_io.policies import POLICIES
from expert_io.scheduler import Eager, ExpectedGain
from expert_io.slices import BLOCK
from launch.cli import cli
from launch.simulate.account import Run, simulate
from launch.simulate.disk import DiskModel
from launch.simulate.passes import Foretold, Times, Waking, future
from launch.simulate.replay import LayerPass, Machine, Replay, Said, plain_slices
from protocol.errors import UsageError
from protocol.route_trace import RouteTrace, RouteTraceWriter
from tests.simulate.synthetic_trace import EXPERTS, LAYERS, write_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> RouteTrace:
    return RouteTrace(write_trace(tmp_path_factory.mktemp("traces") / "run.routes", 90))


def machine(slots: int, read_s: float, *, in_flight: int = 2) -> Machine:
    """A read of one expert takes `read_s`, a layer 10 ms."""
    disk = DiskModel(40_000 / read_s)
    return Machine(slots, 2, 4, disk, plain_slices(LAYERS, EXPERTS, 40_000, 8192), in_flight)


def figures(
    trace: RouteTrace, on: Machine, foretold: str = "off", policy: str = "lru", **more: bool
) -> dict[str, float]:
    run = Run([trace], on, policy, Foretold(foretold), Times(None), 40, None, **more)
    return simulate(run)


@pytest.mark.parametrize(("slots", "read_s"), [(40, 0.015), (96, 0.005)])
def test_prefetch_never_loses_and_a_good_predictor_gains(
    trace: RouteTrace, slots: int, read_s: float
) -> None:
    off = figures(trace, machine(slots, read_s, in_flight=0))
    on = figures(trace, machine(slots, read_s), "gate.moe.1")
    perfect = figures(trace, machine(slots, read_s), "oracle:1")
    assert perfect["stalled_ms_per_token"] <= off["stalled_ms_per_token"]
    gain = off["ms_per_token"] - on["ms_per_token"]
    assert gain >= -0.005 * off["ms_per_token"]
    assert on["precision"] >= 0.6
    # Its guesses cost what wrong ones read, above all where a piece takes a third of a layer.
    assert gain >= 0.3 * (off["ms_per_token"] - perfect["ms_per_token"])


def test_every_step_is_said_as_it_begins(trace: RouteTrace) -> None:
    run = Run([trace, trace], machine(40, 0.01), "lru", Foretold("off"), Times(None), 0, 20)
    steps: list[int] = []
    simulate(run, steps.append)
    assert steps == list(range(40))


def test_a_predictor_that_is_mostly_wrong_is_left_unread(tmp_path: Path) -> None:
    bad = RouteTrace(write_trace(tmp_path / "bad.routes", 100, right=0.1))
    off = figures(bad, machine(60, 0.02, in_flight=0))
    on = figures(bad, machine(60, 0.02), "gate.moe.1")
    assert on["stalled_ms_per_token"] <= 1.005 * off["stalled_ms_per_token"]
    eager = figures(bad, machine(60, 0.02), "gate.moe.1", eager=True)
    assert eager["precision"] < 0.3, "the predictor is worth nothing"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_misses_less_than_belady(trace: RouteTrace, policy: str) -> None:
    on = machine(70, 0.001, in_flight=0)
    best = figures(trace, on, policy="belady")["misses_per_token"]
    assert figures(trace, on, policy=policy)["misses_per_token"] >= best > 0


def test_misses_are_those_of_the_policy_alone(trace: RouteTrace) -> None:
    """A replay with a disk that takes no time is a plain cache simulation, but for the reserve."""
    on = machine(90, 1e-9, in_flight=0)
    policy, resident, misses = Belady(future([trace], None)), set(), 0
    at = 0
    for number, step in enumerate(trace):
        for layer, picks in enumerate(step.picks):
            policy.now = at
            keys = {(layer, expert) for expert in picks.flatten().tolist()}
            for key in keys & resident:
                policy.used(key)
            for key in keys - resident:
                misses += number >= 40
                while len(resident) >= 90 - on.reserve:
                    victim = policy.victim(keys)
                    assert victim is not None
                    policy.removed(victim)
                    resident.discard(victim)
                resident.add(key)
                policy.inserted(key)
            at += 1
    simulated = figures(trace, on, policy="belady")["misses_per_token"]
    assert simulated == pytest.approx(misses / 50, rel=0.05)


def test_waiting_is_what_the_disk_takes_beyond_the_shared_expert() -> None:
    """One layer, one pick, nothing cached: known to the microsecond."""
    on = Machine(8, 1, 1, DiskModel(1_000_000.0), plain_slices(1, 4, 8192, 8192), 0)
    replay = Replay(on, POLICIES["lru"](0), ExpectedGain())
    replay.layer(LayerPass(0, 0, 0.001, 0.002, [3], ()))
    # 8,192 us to read; the shared expert takes half of the 2 ms meanwhile.
    assert replay.stalled == pytest.approx(0.008192 - 0.001, abs=1e-6)
    assert replay.now == pytest.approx(0.001 + 0.008192 + 0.001, abs=1e-6)
    replay.layer(LayerPass(1, 0, 0.001, 0.002, [3], (Said(0, [], []),)))
    assert (replay.hits, replay.misses) == (1, 1)
    replay.close()


def test_a_miss_takes_what_its_four_messages_take_and_leaves_compute_slow() -> None:
    """Two pieces for one reader, which turns from one to the next."""
    disk = DiskModel(1_000_000.0)
    on = Machine(8, 1, 1, disk, plain_slices(1, 4, 16384, 8192), 0, message_s=0.0004)
    on = replace(on, turn_s=0.0002)
    replay = Replay(on, POLICIES["lru"](0), ExpectedGain())
    replay.layer(LayerPass(0, 0, 0.001, 0.002, [3], (), waking=0.005))
    read_s = 2 * 0.008192 + 0.0002
    assert replay.stalled == pytest.approx(4 * 0.0004 + read_s - 0.001, abs=1e-6)
    assert replay.now == pytest.approx(0.001 + 4 * 0.0004 + read_s + 0.005 + 0.001, abs=1e-6)
    replay.close()


def test_a_wrong_guess_on_a_slow_disk_holds_up_a_miss_for_a_step_of_it() -> None:
    """A read of a megabyte takes a second, and is stopped a block after it proved wrong."""
    mib = 1 << 20
    on = Machine(8, 1, 1, DiskModel(float(mib)), plain_slices(2, 4, mib, mib), 1)
    waited = {}
    for picks in ([2], [1]):
        replay = Replay(on, POLICIES["lru"](0), Eager())
        replay.layer(LayerPass(0, 1, 0.001, 0.001, [0], ()))  # from which the disk is known
        replay.layer(LayerPass(1, 0, 0.001, 0.001, [], (Said(1, [1], [1.0]),)))
        before = replay.stalled
        replay.layer(LayerPass(1, 1, 0.5, 0.001, picks, ()))
        waited[picks[0]] = replay.stalled - before
        replay.close()
    assert 1.0 < waited[2] < 1.0 + BLOCK / mib
    assert waited[1] == pytest.approx(0.5, abs=0.002), "the right one is read to its end"


def test_what_misses_made_a_layer_slow_is_not_taken_for_its_computing(tmp_path: Path) -> None:
    """Every other token misses one expert in each layer, and each takes 3 ms longer then."""
    plain = RouteTrace(write_trace(tmp_path / "plain.routes", 64))
    path = tmp_path / "missed.routes"
    with RouteTraceWriter(path, plain.header) as writer:
        for step in plain:
            resident = np.ones_like(step.resident)
            resident[:, :, 0] = step.step % 2 == 0
            seconds = step.seconds.copy()
            seconds[:, 1] += 0.003 * (step.step % 2)
            writer.write(replace(step, resident=resident, seconds=seconds))
    missed = RouteTrace(path)
    waking = Waking(missed)
    for step in missed:
        expected = np.broadcast_to([0.006, 0.004, 0.003], (LAYERS, 3))
        assert waking.apart(step) == pytest.approx(expected, abs=1e-5)


def run_command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["simulate", *arguments])
    if isinstance(result.exception, UsageError):
        return 2, str(result.exception)
    return result.exit_code, result.output


def test_every_combination_is_reported(trace: RouteTrace, tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"pool_gib_s": 0.01}))
    code, output = run_command(
        *(str(trace.path), "--cache", "40", "--cache", "50%", "--bench", str(bench)),
        *("--policy", "lru", "--policy", "belady", "--prefetch", "oracle", "--prefetch", "off"),
        *("--steps", "60", "--warm", "20", "--json"),
    )
    assert code == 0, output
    runs = json.loads(output)
    assert len(runs) == 8
    assert {run["slots"] for run in runs} == {40, 96}
    assert all(run["tokens"] == 40 for run in runs)
    oracle = [run for run in runs if run["prefetch"] == "oracle"]
    assert all(run["hidden"] > 0 and run["precision"] > 0.9 for run in oracle)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefetch", "gate.stream.3"], "has no predictor gate.stream.3; there are gate.moe.1"),
        (["--cache", "3%"], "a layer needs"),
        (["--cache", "lots"], "is not a size"),
        (["--bench", "/nowhere"], "is no output of"),
    ],
)
def test_senseless_options_end_in_one_line(
    trace: RouteTrace, arguments: list[str], words: str
) -> None:
    code, output = run_command(str(trace.path), *arguments)
    assert code == 2 and words in output and "Traceback" not in output


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("hello")
    code, output = run_command(str(path))
    assert code == 2 and "is no route trace" in output


def test_a_trace_without_a_step_is_an_internal_error(tmp_path: Path) -> None:
    code, output = run_command(str(write_trace(tmp_path / "empty.routes", 0)))
    assert code == 2 and "holds no whole step" in output
