"""A trace of the next tokens, recorded while people use the server."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from launch.server.activity import Activity
from launch.server.engine import Engine
from launch.server.errors import ApiError

MOST_TOKENS = 2000
# An idle server generates nothing to record.
PATIENCE_S = 120.0
POLL_S = 0.02


class Recorder:
    """Records one trace at a time."""

    def __init__(self, engine: Engine, activity: Activity) -> None:
        self._engine = engine
        self._activity = activity
        self._busy = False

    async def record(self, tokens: int) -> bytes:
        """The trace, a JSON file for ui.perfetto.dev, once `tokens` more tokens have come or
        patience has ended. Raises ApiError."""
        if self._busy:
            raise ApiError(409, "a trace is being recorded already; wait for it")
        self._busy = True
        try:
            return await self._record(tokens)
        finally:
            self._busy = False

    async def _record(self, tokens: int) -> bytes:
        until = self._activity.tokens + tokens
        with tempfile.TemporaryDirectory(prefix="headrace-trace-") as directory:
            output = Path(directory) / "trace.json"
            await self._engine.trace_start()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while self._activity.tokens < until:
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                pass  # what has come is worth having
            finally:
                await self._engine.trace_stop(output)
            return await asyncio.to_thread(output.read_bytes)
