"""`headrace bench io`: the reader pool through the service against plain preadv loops.

Both read the same experts of the same files, one directly after the other, in alternating order, so
that what the machine does meanwhile meets both.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from launch.bench.expert_group import ExpertGroup, every_expert
from launch.child import ROOT
from launch.foreground import console
from launch.options import GIB
from protocol.errors import HeadraceError, UsageError

Keys = list[tuple[int, int]]
ANSWER_TIMEOUT_S = 120.0


def run(
    checkpoint: Path,
    readers: int,
    rounds: int,
    round_bytes: int,
    piece_bytes: int,
    direct: bool,
    huge_pages: bool = True,
) -> dict[str, Any]:
    """Medians and worst per cents of both ways, in GiB/s; raises UsageError for too few experts."""
    window = 2 * readers
    slots = _slots(readers)
    group = _group(checkpoint, readers, piece_bytes, direct, huge_pages=huge_pages)
    sets = _sets(group, slots, round_bytes)
    with group:
        pool: list[float] = []
        plain: list[float] = []
        for number in range(rounds + 1):
            keys = sets[number % len(sets)]
            ways = [(_read_pool, pool), (_read_plain, plain)]
            for read, results in ways if number % 2 else reversed(ways):
                results.append(_bytes(group, keys) / read(group, keys, window) / GIB)
            console.print(
                f"round {number} of {rounds}: pool {pool[-1]:.3f}, preadv {plain[-1]:.3f} GiB/s"
            )
        return _account(pool[1:], plain[1:], group)


def compare_pack(
    checkpoint: Path,
    pack: Path,
    readers: int,
    rounds: int,
    round_bytes: int,
    piece_bytes: int,
    direct: bool,
) -> dict[str, Any]:
    """The pool reading from `pack` against the pool reading from the shards, the same experts in
    alternating order, in GiB/s of experts' own bytes; raises UsageError and CheckpointError."""
    with (
        _group(checkpoint, readers, piece_bytes, direct) as shards,
        _group(checkpoint, readers, piece_bytes, direct, pack) as packed,
    ):
        sets = _sets(shards, _slots(readers), round_bytes)
        results: dict[str, list[float]] = {"shards": [], "pack": []}
        for number in range(rounds + 1):
            keys = sets[number % len(sets)]
            ways = [("shards", shards), ("pack", packed)]
            for name, group in ways if number % 2 else reversed(ways):
                seconds = _read_pool(group, keys, 2 * readers)
                results[name].append(len(keys) * _expert_bytes(shards) / seconds / GIB)
            console.print(
                f"round {number} of {rounds}: pack {results['pack'][-1]:.3f}, "
                f"shards {results['shards'][-1]:.3f} GiB/s"
            )
        pairs = list(zip(results["pack"], results["shards"], strict=True))[1:]
        return {
            "pack_gib_s": statistics.median(pair[0] for pair in pairs),
            "shards_gib_s": statistics.median(pair[1] for pair in pairs),
            "ratio": statistics.median(a / b for a, b in pairs),
            "reads_an_expert": {
                name: len(group.slices.experts[0][0].pieces)
                for name, group in (("pack", packed), ("shards", shards))
            },
            "rounds": len(pairs),
            "readers": readers,
            "expert_bytes": _expert_bytes(shards),
        }


def _slots(readers: int) -> int:
    """Room for two windows of demands, so that none waits for a slot."""
    return 4 * readers + 4


def _group(
    checkpoint: Path,
    readers: int,
    piece_bytes: int,
    direct: bool,
    pack: Path | None = None,
    huge_pages: bool = True,
) -> ExpertGroup:
    return ExpertGroup(
        checkpoint,
        slots=_slots(readers),
        readers=readers,
        reserve=2,
        piece_bytes=piece_bytes,
        predicted_in_flight=0,
        policy="lru",
        direct=direct,
        pack=pack,
        huge_pages=huge_pages,
    )


def _expert_bytes(group: ExpertGroup) -> int:
    return sum(piece.needed for piece in group.slices.experts[0][0].pieces)


def _account(pool: list[float], plain: list[float], group: ExpertGroup) -> dict[str, Any]:
    """The first round only warmed up and is left out by the caller."""
    return {
        "pool_gib_s": statistics.median(pool),
        "preadv_gib_s": statistics.median(plain),
        "ratio": statistics.median(a / b for a, b in zip(pool, plain, strict=True)),
        "pool_gib_s_p99": min(pool),
        "preadv_gib_s_p99": min(plain),
        "rounds": len(pool),
        "readers": group.readers,
        "expert_bytes": _expert_bytes(group),
    }


def _sets(group: ExpertGroup, slots: int, round_bytes: int) -> list[Keys]:
    """Disjoint sets of experts, each larger than the cache, so that none is ever a hit.

    At most half of the experts each: there have to be two, or a round would find the other's.
    """
    keys = every_expert(group.config)
    if len(keys) < 2 * slots:
        raise UsageError(
            f"{group.checkpoint}: has {len(keys)} experts, two rounds of {slots} do not fit; "
            "give fewer --readers, or a checkpoint with more experts"
        )
    count = min(max(slots, round_bytes // group.slices.slot_bytes), len(keys) // 2)
    return [keys[i : i + count] for i in range(0, len(keys) - count + 1, count)]


def _bytes(group: ExpertGroup, keys: Keys) -> int:
    return sum(
        p.length for layer, expert in keys for p in group.slices.experts[layer][expert].pieces
    )


def _read_pool(group: ExpertGroup, keys: Keys, window: int) -> float:
    """Seconds to demand all of `keys`, two demands of half a window always open."""
    begin = time.perf_counter()
    waiting: deque[tuple[int, int, list[int]]] = deque()
    for part in batched_by_layer(keys, window):
        waiting.append((group.ask(*part), *part))
        if len(waiting) == 2:
            _await(group, *waiting.popleft())
    while waiting:
        _await(group, *waiting.popleft())
    return time.perf_counter() - begin


def _await(group: ExpertGroup, demand: int, layer: int, experts: list[int]) -> None:
    group.await_resident(layer, experts)
    group.done_with(demand)
    group.bump_epoch()


def batched_by_layer(keys: Keys, most: int) -> list[tuple[int, list[int]]]:
    """`keys` as demands: (layer, at most `most` experts), in order."""
    parts: list[tuple[int, list[int]]] = []
    for layer, expert in keys:
        if not parts or parts[-1][0] != layer or len(parts[-1][1]) == most:
            parts.append((layer, []))
        parts[-1][1].append(expert)
    return parts


def _read_plain(group: ExpertGroup, keys: Keys, window: int) -> float:
    """Seconds until the last of as many preadv loops as readers has read its share of `keys`."""
    reads = [
        (p.file, p.offset, p.length)
        for layer, expert in keys
        for p in group.slices.experts[layer][expert].pieces
    ]
    files = [str(path) for path in group.slices.files]
    loops = [
        _start_loop(
            {
                "direct": group.direct,
                "files": files,
                "reads": reads[n :: group.readers],
                "memory": group.arena.data.nbytes // group.readers,
                "huge_pages": group.huge_pages,
            }
        )
        for n in range(group.readers)
    ]
    try:
        for loop in loops:
            _line(loop)
        begin = time.perf_counter()
        for loop in loops:
            print(file=loop.stdin, flush=True)
        for loop in loops:
            _line(loop)
        return time.perf_counter() - begin
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


def _start_loop(work: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch.bench.preadv_loop"]
    pipe = subprocess.PIPE
    loop = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    print(json.dumps(work), file=loop.stdin, flush=True)
    return loop


def _line(loop: subprocess.Popen[str]) -> str:
    assert loop.stdout is not None
    line = loop.stdout.readline()
    if not line:
        raise HeadraceError("a plain preadv loop ended early; see its message above")
    return line
