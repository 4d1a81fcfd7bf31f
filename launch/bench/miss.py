"""`headrace bench miss`: what misses and reads take beyond the disk, for `headrace simulate`.

Compute's own source of experts demands them of a real service and real readers on an emulated disk,
one to top-k at a time. Between two demands this process works as a layer does: it walks through
more memory than caches hold, so that what is waked finds them as cold as in a run. The longer
everybody has slept the more a miss costs, so it is to be measured with the disk that is simulated.

What a demand would take if only the disk took time is the simulator's own replay of it. What it
took beyond that is laid, by least squares, to the demand as a whole and to each turn, from one read
to its next, of the reader that was done last. No demand is so small that the disk is done with it
before this process is with its own work: how long it took would say nothing about a miss.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expert_io.policies import DEFAULT_POLICY, make_policy
from expert_io.scheduler import ExpectedGain
from launch.bench.expert_group import ExpertGroup
from launch.bench.expert_tier import experts_of
from launch.foreground import console
from launch.simulate.disk import DiskModel
from launch.simulate.replay import LayerPass, Machine, Replay
from protocol.config import ModelConfig
from protocol.errors import UsageError
from protocol.layouts import ABSENT

# The slowest ones met something else: the host took the processor for longer than a miss takes.
LEFT_OUT = 0.01
UNMEASURED = 10  # demands that warm everything up
# Of a layer's time, what comes after the demand: the shared expert, and those that are there.
AFTER = 0.25
# More than any cache, in steps of about 0.1 ms.
WALKED_BYTES, STEP_BYTES = 64 << 20, 1 << 20


@dataclass(frozen=True, slots=True)
class Demanded:
    """`experts` of `layer` were there `seconds` after they had been demanded."""

    layer: int
    experts: Sequence[int]
    seconds: float


def run(
    checkpoint: Path,
    *,
    readers: int,
    piece_bytes: int,
    bandwidth: float,
    latency: float,
    layer_s: float,
    demands: int,
) -> dict[str, Any]:
    """`fitted` to `demands` demands of a disk of `bandwidth` bytes/s and `latency` seconds a read,
    in layers of `layer_s` seconds. Raises UsageError where that shows no misses."""
    config = ModelConfig.load(checkpoint)
    top_k = config.num_experts_per_tok
    # Half of them is the least that any layer can live with.
    slots = 4 * top_k
    if config.n_routed_experts < slots + top_k:
        raise UsageError(
            f"{checkpoint}: a layer's {config.n_routed_experts} experts fit {slots} slots all or "
            "nearly, so what is demanded may be there; give a checkpoint with more experts"
        )
    group = ExpertGroup(
        checkpoint,
        slots=slots,
        readers=readers,
        reserve=top_k,
        piece_bytes=piece_bytes,
        predicted_in_flight=0,
        bandwidth=bandwidth,
        latency=latency,
    )
    disk = DiskModel(bandwidth, latency, readers)
    machine = Machine(slots, readers, 1, disk, group.slices, 0)
    least = least_waited_for(machine, top_k, AFTER * layer_s)
    with group:
        timed = _timed(group, layer_s, least, UNMEASURED + demands)[UNMEASURED:]
    return fitted(timed, machine) | {"demands": demands, "readers": readers}


def least_waited_for(machine: Machine, most: int, own_s: float) -> int:
    """The fewest experts for which the disk takes longer than `own_s` seconds of work beside it;
    raises UsageError where it does not for `most`."""
    for count in range(1, most + 1):
        disk_s = _replayed(0, range(count), machine)
        if disk_s > own_s:
            return count
    raise UsageError(
        f"a layer computes for {1e3 * own_s:.3g} ms while the disk takes {1e3 * disk_s:.3g} for "
        f"{most} experts, so nothing is waited for; give a smaller --layer-ms or --disk-bandwidth"
    )


def fitted(timed: Sequence[Demanded], machine: Machine) -> dict[str, Any]:
    """Microseconds: `miss_us` of a demand, `turn_us` of each turn, and the standard errors of both;
    of a demand in the mean, what it took (`took_us`) and what the disk took of it (`disk_us`).

    Where every demand has as many turns, what they take is part of `miss_us`, and the error of
    `turn_us` is None.
    """
    took = np.array([demanded.seconds for demanded in timed])
    disk = np.array([_replayed(d.layer, d.experts, machine) for d in timed])
    # What a microsecond of turning adds, in microseconds.
    turning = replace(machine, turn_s=1e-6)
    turns = 1e6 * (np.array([_replayed(d.layer, d.experts, turning) for d in timed]) - disk)
    kept = np.argsort(took - disk)[: math.ceil(len(timed) * (1 - LEFT_OUT))]
    took, disk, turns = took[kept], disk[kept], turns[kept]
    alike = bool(np.ptp(turns) < 0.5)
    rows = np.stack([np.ones_like(disk), np.zeros_like(turns) if alike else turns], axis=1)
    found, *_ = np.linalg.lstsq(rows, took - disk, rcond=None)
    spread = took - disk - rows @ found
    variance = spread @ spread / max(1, len(kept) - 2)
    errors = np.sqrt(np.diag(np.linalg.pinv(rows.T @ rows)) * variance)
    # No time is negative: where noise makes one so, the other is the whole of it.
    for one, other in ((0, 1), (1, 0)):
        if found[other] < 0:
            found[other] = 0.0
            found[one] = max(0.0, np.linalg.lstsq(rows[:, [one]], took - disk, rcond=None)[0][0])
    return {
        "miss_us": 1e6 * float(found[0]),
        "miss_us_error": 1e6 * float(errors[0]),
        "turn_us": 1e6 * float(found[1]),
        "turn_us_error": None if alike else 1e6 * float(errors[1]),
        "took_us": 1e6 * float(took.mean()),
        "disk_us": 1e6 * float(disk.mean()),
    }


def _replayed(layer: int, experts: Sequence[int], machine: Machine) -> float:
    """Seconds that a demand of `experts` takes on `machine`."""
    replay = Replay(machine, make_policy(DEFAULT_POLICY, 0), ExpectedGain())
    try:
        replay.layer(LayerPass(0, layer, 0.0, 0.0, experts, ()))
        return replay.stalled
    finally:
        replay.close()


def _timed(group: ExpertGroup, layer_s: float, least: int, demands: int) -> list[Demanded]:
    """Demands of at least `least` experts."""
    most = group.config.num_experts_per_tok
    source = experts_of(group, torch.device("cpu"))
    work = _Walk()
    chance = random.Random(0)
    timed = []
    for number in range(demands):
        if number % (demands // 10) == 0:
            console.print(f"{number} of {demands} demands")
        layer = number % group.config.num_hidden_layers
        work.for_seconds((1 - AFTER) * layer_s)
        words = source.look_up(layer, range(group.config.n_routed_experts))
        absent = [expert for expert, word in enumerate(words) if word == ABSENT]
        experts = sorted(chance.sample(absent, chance.randint(least, most)))
        arriving = source.fetch(layer, experts)
        # Sending is compute's own time, and so part of a recorded layer's; so is using what came.
        begin = time.perf_counter()
        work.for_seconds(AFTER * layer_s)
        for _ in arriving:
            there = time.perf_counter()
        timed.append(Demanded(layer, experts, there - begin))
        source.release()
    return timed


class _Walk:
    """Computing, as far as processor and caches notice."""

    def __init__(self) -> None:
        self._memory = np.ones((WALKED_BYTES // STEP_BYTES, STEP_BYTES // 4), np.float32)
        self._at = 0

    def for_seconds(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._at = (self._at + 1) % len(self._memory)
            self._memory[self._at].sum()
