"""`headrace bench ipc`: what a hit costs compute, and what the service adds to a miss.

A hit is a look at the directory in shared memory. A miss is timed from the demand until such a
look finds the expert; what the reader itself took is subtracted. One reader, so that its
reads of one expert follow each other and the handing over between them counts as overhead too. What
is left is set against the two round trips that it takes at least (demand and order, done and
landed) between processes that slept as long as a miss's read takes and do nothing else.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compute.bounded_wait import BoundedWait
from launch.bench.echo import round_trips
from launch.bench.expert_group import TIMEOUT_S, ExpertGroup, every_expert
from launch.bench.expert_tier import experts_of
from launch.bench.io import batched_by_layer
from protocol import counters
from protocol.errors import StallError
from protocol.layouts import ABSENT, look_up


def run(
    checkpoint: Path, hits: int, misses: int, readers: int, busy_poll: float | None
) -> dict[str, Any]:
    """Percentiles in microseconds over `hits` looks and `misses` reads; `busy_poll` as in
    GroupOptions."""
    with ExpertGroup(
        checkpoint, slots=24, readers=readers, piece_bytes=1 << 30, busy_poll=busy_poll
    ) as group:
        picks = list(range(group.config.num_experts_per_tok))
        group.fetch(0, picks)
        hit = _time_hits(group, picks, hits)
        timed = [_time_miss(group, *key) for key in _absent_keys(group, misses + 5)][5:]
        read_s = statistics.median(read for _, read in timed)
        bare = 2e6 * round_trips(group.runtime_path, misses, read_s)
    miss = [overhead for overhead, _ in timed]
    return {
        "hit_us_p50": float(np.percentile(hit, 50)),
        "hit_us_p99": float(np.percentile(hit, 99)),
        "miss_overhead_us_p50": float(np.percentile(miss, 50)),
        "miss_overhead_us_p99": float(np.percentile(miss, 99)),
        "miss_read_us_p50": read_s * 1e6,
        "two_round_trips_us_p50": bare,
        "experts_a_layer": len(picks),
        "hits": hits,
        "misses": misses,
        "reads_a_miss": len(group.slices.experts[0][0].pieces),
        "busy_poll_ms": group.busy_poll * 1e3,
    }


def _time_hits(group: ExpertGroup, picks: list[int], count: int) -> list[float]:
    experts = experts_of(group, torch.device("cpu"))
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        words = experts.look_up(0, picks)
        here = ABSENT not in words
        times.append((time.perf_counter() - begin) * 1e6)
        assert here
    return times


def _absent_keys(group: ExpertGroup, count: int) -> list[tuple[int, int]]:
    """Experts in an order in which none is resident when its turn comes."""
    every = every_expert(group.config)
    return [every[(n * 7919 + 40) % len(every)] for n in range(count)]


def _time_miss(group: ExpertGroup, layer: int, expert: int) -> tuple[float, float]:
    """Microseconds beyond the reads, and the reads' own seconds."""
    for others_layer, others in batched_by_layer(_others(group, layer, expert), 8):
        if group.directory.entry[layer, expert] == ABSENT:
            break
        group.fetch(others_layer, others)
    group.bump_epoch()
    before = group.stats()[counters.READ_SECONDS]
    begin = time.perf_counter()
    group.ask(layer, [expert])
    waiting = BoundedWait(TIMEOUT_S, group.busy_poll)
    while ABSENT in look_up(group.directory, group.arena, layer, [expert]):
        if waiting.exhausted:
            raise StallError(f"layer {layer} expert {expert} did not come")
        group.raise_deaths()
        waiting.nap()  # as compute does
    total = time.perf_counter() - begin
    # The service counts the read's time once it has heard of it.
    group.await_resident(layer, [expert])
    group.done_with(group.demands)
    read = group.stats()[counters.READ_SECONDS] - before
    return (total - read) * 1e6, read


def _others(group: ExpertGroup, layer: int, expert: int) -> list[tuple[int, int]]:
    """Experts whose reading pushes this one out."""
    return [key for key in every_expert(group.config) if key != (layer, expert)]
