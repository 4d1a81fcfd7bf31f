"""The engine's figures over time: sampled once a second while somebody looks, turned into rates.

Owns the history and the age of every resident expert. Promises: an engine nobody watches is not
asked; many viewers cost no more than one.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections import deque
from typing import Any

import numpy as np

from launch.server.activity import Activity
from launch.server.engine import Engine
from launch.server.rates import Sample, rates
from launch.server.waiting_line import WaitingLine
from protocol.errors import HeadraceError

PERIOD_S = 1.0
KEPT_SAMPLES = 180
# Sampling stops so long after the last look.
ATTENTION_S = 10.0
# Cells cool down from 255 (read this second) to 1 with this time constant.
COOLING_S = 20.0


class Monitor:
    """Figures of one engine and one server."""

    def __init__(self, engine: Engine, activity: Activity, line: WaitingLine) -> None:
        self._engine = engine
        self._activity = activity
        self._line = line
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._rates: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self._looked = 0.0
        self._sampler: asyncio.Task[None] | None = None
        self._sampled = asyncio.Event()
        directory = engine.directory
        self._seen = np.full((directory.layers, directory.experts), -1, np.int64)
        self._landed = np.zeros(self._seen.shape)

    async def look(self) -> None:
        """Note that somebody watches, and have a sample at most two periods old."""
        self._looked = time.monotonic()
        if self._sampler is None or self._sampler.done():
            self._sampled.clear()
            self._sampler = asyncio.create_task(self._sample_while_watched())
        await self._sampled.wait()
        if self._sampler.done():
            self._sampler.result()  # raises what ended it

    def figures(self, history: int) -> dict[str, Any]:
        """Everything the dashboards show, with the last `history` samples' rates."""
        last = self._samples[-1] if self._samples else None
        return {
            "time": time.time(),
            "uptime_s": time.time() - self._activity.started,
            "queue": {
                "running": self._line.running,
                "waiting": self._line.waiting,
                "capacity": self._line.capacity,
            },
            "request": self._request(),
            "totals": {
                "requests": dict(self._activity.outcomes),
                "prompt_tokens": self._activity.prompt_tokens,
                "reused_tokens": self._activity.reused_tokens,
                "tokens": self._activity.tokens,
            },
            "now": self._rates[-1] if self._rates else None,
            "history": list(self._rates)[-history:] if history else [],
            "processes": last.stats if last is not None else {},
            "memory": self._memory(),
            "facts": self._engine.facts,
        }

    def residency(self) -> dict[str, Any]:
        """A byte an expert, layers first: 0 absent, else how lately it was read, 255 this second;
        in base64."""
        entry = self._engine.directory.entry.copy()
        now = time.monotonic()
        fresh = (entry != self._seen) & (entry >= 0)
        self._landed[fresh] = now
        self._seen = entry
        warmth = 1 + 254 * np.exp((self._landed - now) / COOLING_S)
        cells = np.where(entry >= 0, warmth, 0).astype(np.uint8)
        layers, experts = cells.shape
        data = base64.b64encode(cells.tobytes()).decode()
        return {"layers": layers, "experts": experts, "cells": data}

    async def close(self) -> None:
        """Stop sampling."""
        if self._sampler is not None:
            self._sampler.cancel()
            await asyncio.wait((self._sampler,))

    async def _sample_while_watched(self) -> None:
        try:
            while time.monotonic() - self._looked < ATTENTION_S:
                await self._take_sample()
                self._sampled.set()
                await asyncio.sleep(PERIOD_S)
        finally:
            self._sampled.set()

    async def _take_sample(self) -> None:
        stats = await self._engine.stats()
        sample = Sample(
            time.monotonic(),
            stats,
            self._activity.tokens,
            self._activity.decode_tokens,
            self._activity.decode_seconds,
            self._activity.prefill_seconds,
        )
        if self._samples:
            self._rates.append({"time": time.time(), **rates(self._samples[-1], sample)})
        self._samples.append(sample)

    def _request(self) -> dict[str, Any] | None:
        current = self._activity.current
        if current is None:
            return None
        return {
            "prompt_tokens": current.prompt_tokens,
            "prefilled": current.prefilled,
            "reused": current.reused,
            "tokens": current.tokens,
            "seconds": time.monotonic() - current.began,
        }

    def _memory(self) -> dict[str, Any]:
        plan = self._engine.plan
        return {
            "slots": plan.slots,
            "slot_bytes": plan.slot_bytes,
            "arena_bytes": plan.arena_bytes,
            "dense_bytes": plan.dense_bytes,
            "all_experts": plan.all_experts,
            "resident_bytes": {
                name: size
                for name, pid in {**self._engine.pids, "server": os.getpid()}.items()
                if (size := private_bytes(pid)) is not None
            },
        }


def private_bytes(pid: int) -> int | None:
    """Resident memory of a process without what it shares; None where it has gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            fields = file.read().split()
    except OSError:
        return None
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


async def health(engine: Engine) -> tuple[int, dict[str, Any]]:
    """The status and body of `/health`: ok, degraded (reads failed), or failed."""
    if engine.failure is not None:
        return 503, {"status": "failed", "reason": str(engine.failure)}
    try:
        stats = await engine.stats()
    except HeadraceError as error:
        return 503, {"status": "failed", "reason": str(error)}
    troubles = {
        f"{process}.{name}": int(value)
        for process, figures in stats.items()
        for name, value in figures.items()
        if name in ("read_failures", "readers_replaced") and value > 0
    }
    return 200, {"status": "degraded" if troubles else "ok", "troubles": troubles}
