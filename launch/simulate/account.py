"""One simulated run: what goes in, and the figures that come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from expert_io.belady import Belady
from expert_io.policies import make_policy
from expert_io.policy import EvictionPolicy
from expert_io.scheduler import Eager, ExpectedGain
from launch.simulate.passes import Foretold, Times, future
from launch.simulate.replay import Machine, Replay
from protocol import counters
from protocol.errors import UsageError
from protocol.route_trace import RouteTrace

BELADY = "belady"


@dataclass(frozen=True, slots=True)
class Run:
    """`traces` one after the other on `machine`. The first `warm` steps fill the cache and teach
    the scheduler, and are in no figure. `eager` reads every guess whatever it costs."""

    traces: Sequence[RouteTrace]
    machine: Machine
    policy: str
    foretold: Foretold
    times: Times
    warm: int
    most: int | None
    eager: bool = False


def simulate(run: Run, at_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """Figures of the steps after the warm-up, a token where they say so. Precision counts a read
    that was under way when it was picked as right; `hidden` is the share of the waiting without
    prefetch that is gone, which the caller fills in. `at_step` hears of each step that begins."""
    policy: EvictionPolicy
    belady = None
    if run.policy == BELADY:
        policy = belady = Belady(future(run.traces, run.most))
    else:
        policy = make_policy(run.policy, 0)
    replay = Replay(run.machine, policy, Eager() if run.eager else ExpectedGain())
    steps = tokens = at = 0
    begin = _standing(replay)
    try:
        for trace in run.traces:
            before = at
            for layer_pass in run.foretold.passes(trace, run.times, steps, run.most):
                if layer_pass.layer == 0:
                    at_step(layer_pass.step)
                if layer_pass.step == run.warm and layer_pass.layer == 0:
                    begin, tokens = _standing(replay), 0
                if belady is not None:
                    belady.now = at
                replay.layer(layer_pass)
                at += 1
                if layer_pass.layer == trace.header.layers - 1:
                    tokens += layer_pass.tokens
            if at == before:
                raise UsageError(f"{trace.path}: holds no whole step; record a longer one")
            steps = layer_pass.step + 1
        end = _standing(replay)
    finally:
        replay.close()
    return _figures(run, {key: end[key] - begin.get(key, 0) for key in end}, tokens)


def _standing(replay: Replay) -> dict[str, float]:
    return {
        **replay.residency.figures(),
        "seconds": replay.now,
        "stalled": replay.stalled,
        "hits": replay.hits,
        "misses": replay.misses,
    }


def _figures(run: Run, spent: dict[str, float], tokens: int) -> dict[str, Any]:
    issued = spent.get(counters.PREDICTED_ISSUED, 0.0)
    used = spent.get(counters.PREDICTED_USED, 0.0)
    late = spent.get(counters.PREDICTED_LATE, 0.0)
    wanted = used + spent["misses"]
    return {
        "policy": run.policy,
        "prefetch": run.foretold.name + (" (eager)" if run.eager else ""),
        "slots": run.machine.slots,
        "cache": run.machine.slots / (run.machine.layers * run.machine.experts),
        "bandwidth": run.machine.disk.bandwidth,
        "tokens": tokens,
        "ms_per_token": 1e3 * spent["seconds"] / tokens,
        "stalled_ms_per_token": 1e3 * spent["stalled"] / tokens,
        "misses_per_token": spent["misses"] / tokens,
        "hit_rate": spent["hits"] / max(1.0, spent["hits"] + spent["misses"]),
        "read_bytes_per_token": spent.get(counters.READ_BYTES, 0.0) / tokens,
        "predicted_per_token": issued / tokens,
        "precision": (used + late) / issued if issued else None,
        "recall": (used + late) / wanted if wanted else None,
        "hidden": None,
    }
