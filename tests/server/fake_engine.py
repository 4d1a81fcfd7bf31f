"""A scripted engine with the process group's interface: the reply is known, and so is every moment.

One token a byte, which is the hardest shape for whoever streams it; tests await events instead of
sleeping: `reached` says that a token is about to be made, `gate` lets it be made.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from engram_io.token_map import load_tokenizer
from launch.memory import MemoryPlan
from launch.options import GenerateOptions, GroupOptions
from launch.server.engine import Event, Stats
from protocol.config import ModelConfig
from protocol.errors import HeadraceError, failure_kind
from protocol.layouts import Directory, pack_entry
from protocol.messages import Finished, PrefillProgress, TokenEvent
from tests.chat_format.speech import MINI, byte_tokens, spell

Script = str | Callable[[GenerateOptions], str]


class FakeEngine:
    """Replies with `script`, followed by the end of the sequence."""

    def __init__(self, script: Script = "Hello.", checkpoint: Path = MINI) -> None:
        self.options = GroupOptions(checkpoint, max_context=4096)
        self.config = ModelConfig.load(checkpoint)
        self.tokenizer = load_tokenizer(checkpoint, self.config)
        self.plan = MemoryPlan(8, 4096, 1 << 20, 64)
        self.facts = {"device": "scripted"}
        self.failure: HeadraceError | None = None
        self.directory = Directory.create(layers=8, experts=8, slots=8)
        self.directory.entry[:] = -1
        self.directory.entry[0, :3] = [pack_entry(slot, 1) for slot in range(3)]
        self.script = script
        self.error: HeadraceError | None = None
        self.counters: dict[str, float] = {"demand_hits": 10, "steps": 5}
        # What has been asked, cancelled and made.
        self.requests: list[GenerateOptions] = []
        self.cancelled = 0
        self.made = 0
        self.active = self.most_active = 0
        # From token number `hold_from` of an answer on, each one waits for the gate.
        self.hold_from: int | None = None
        self.gate = asyncio.Semaphore(0)
        self.reached = asyncio.Event()
        self.ended = asyncio.Event()
        self.tracing = False

    @property
    def pids(self) -> dict[str, int]:
        return {"compute": os.getpid()}

    async def generate(self, options: GenerateOptions) -> AsyncGenerator[Event, None]:
        if self.failure is not None:
            raise self.failure
        self.requests.append(options)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        finished = False
        try:
            async for event in self._events(options):
                finished = isinstance(event, Finished)
                yield event
        finally:
            self.active -= 1
            self.cancelled += not finished
            self.ended.set()

    async def stats(self) -> Stats:
        if self.failure is not None:
            raise self.failure
        return {"compute": dict(self.counters), "experts": {"queue_depth": 0.0}}

    async def trace_start(self) -> None:
        self.tracing = True

    async def trace_stop(self, output: Path) -> int:
        self.tracing = False
        output.write_text(json.dumps({"traceEvents": []}))
        return 0

    async def _events(self, options: GenerateOptions) -> AsyncGenerator[Event, None]:
        total = len(options.prompt)
        yield PrefillProgress(0, 0, total, 0)
        yield PrefillProgress(0, total, total, 0)
        script = self.script if isinstance(self.script, str) else self.script(options)
        reply = [*byte_tokens(script), self.config.eos_token_id]
        count = 0
        for token in reply[: options.max_tokens]:
            if self.hold_from is not None and count >= self.hold_from:
                self.reached.set()
                await self.gate.acquire()
            await asyncio.sleep(0)
            if self.error and count == 2:
                yield self._finished(options, "error", count, self.error)
                return
            count += 1
            self.made += 1
            logprob = None if options.logprobs is None else -0.25 * count
            top = [token, 300][: options.logprobs or 0]
            yield TokenEvent(0, token, "", logprob, top, [-0.25 * count, -9.0][: len(top)])
        reason = "stop" if len(reply) <= options.max_tokens else "length"
        yield self._finished(options, reason, count)

    def _finished(
        self,
        options: GenerateOptions,
        reason: str,
        count: int,
        error: HeadraceError | None = None,
    ) -> Finished:
        figures = {"tokens_per_s": 10.0, "demand_hits": 3.0}
        said, kind = (str(error), failure_kind(error)) if error else ("", "")
        return Finished(0, reason, "", said, kind, len(options.prompt), 0, count, figures)


def prompt_text(options: GenerateOptions) -> str:
    """What the engine was asked to continue, control tokens spelled out."""
    return spell(options.prompt)
