"""One answer in the terminal: from the dialogue's tokens to text on the screen.

Owns the way of one question. Promises: an answer that is stopped stays in the dialogue as far as it
came; one that fails leaves the dialogue as it was before the question.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from rich.console import Console

from compute.text import TokenBytes
from launch.chat_format.prompt import encode_prompt
from launch.chat_format.reply import ContentDelta, Delta, ReasoningDelta, ReplyParser
from launch.chat_format.vocabulary import Vocabulary
from launch.options import GenerateOptions
from launch.server.engine import Engine
from launch.server.sampling_defaults import SamplingDefaults
from launch.terminal.dialogue import Dialogue
from launch.terminal.live_markdown import LiveMarkdown
from protocol import counters
from protocol.errors import HeadraceError, UsageError, failure
from protocol.messages import Finished, PrefillProgress, TokenEvent

STATUS_S = 0.5


@dataclass(frozen=True, slots=True)
class Choosing:
    """How tokens are chosen; None means as the checkpoint says. `seed` None draws a new one."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


class Talker:
    """Answers the questions of one dialogue."""

    def __init__(
        self, engine: Engine, dialogue: Dialogue, console: Console, choosing: Choosing
    ) -> None:
        """Raises CheckpointError where the tokenizer lacks a chat's control tokens."""
        self.dialogue = dialogue
        self.last: Finished | None = None
        self._engine = engine
        self._console = console
        self._choosing = choosing
        self._vocabulary = Vocabulary(engine.tokenizer, engine.config)
        self._tokens = self._vocabulary.chat_tokens()
        self._token_bytes = TokenBytes(engine.tokenizer, [engine.config.eos_token_id])
        self._defaults = SamplingDefaults.load(engine.options.checkpoint)
        self._context = min(engine.options.max_context, engine.config.max_position_embeddings)

    async def ask(self, text: str) -> None:
        """Put the question and show the answer. Raises HeadraceError; cancel to stop it."""
        self.dialogue.ask(text)
        reading = _Reading(self._parser())
        try:
            options = await self._options()
            with LiveMarkdown(self._console) as screen:
                await self._stream(options, reading, screen)
        except HeadraceError:
            self.dialogue.take_back()
            raise
        except asyncio.CancelledError:
            self.dialogue.answer(reading.content, reading.reasoning)
            raise
        self.dialogue.answer(reading.content, reading.reasoning)

    def _parser(self) -> ReplyParser:
        return ReplyParser(
            self._token_bytes,
            self._tokens,
            self._vocabulary.special,
            self.dialogue.conversation(),
            accept_calls=False,
        )

    async def _options(self) -> GenerateOptions:
        conversation = self.dialogue.conversation()
        prompt = await asyncio.to_thread(
            encode_prompt, conversation, self._vocabulary, self._tokens
        )
        room = self._context - len(prompt)
        if room < 1:
            raise UsageError(
                f"the conversation has {len(prompt)} tokens, the context takes {self._context}; "
                "/clear it, or start again with a larger --max-context"
            )
        chosen, defaults = self._choosing, self._defaults
        return GenerateOptions(
            prompt,
            max_tokens=min(chosen.max_tokens or room, room),
            temperature=defaults.temperature if chosen.temperature is None else chosen.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p if chosen.top_p is None else chosen.top_p,
            min_p=defaults.min_p,
            seed=secrets.randbits(63) if chosen.seed is None else chosen.seed,
        )

    async def _stream(
        self, options: GenerateOptions, reading: _Reading, screen: LiveMarkdown
    ) -> None:
        async with (
            self._watching(reading, screen),
            aclosing(self._engine.generate(options)) as events,
        ):
            async for event in events:
                match event:
                    case PrefillProgress(_, done, total, _):
                        screen.status(f"reading: {done} of {total} tokens")
                    case TokenEvent():
                        reading.token(event.token, screen)
                        if reading.parser.abandoned:
                            break
                    case Finished():
                        if event.reason == "error":
                            raise failure(event.failure, event.error)
                        self.last = event
        reading.finish(screen, cut=self.last is not None and self.last.reason == "length")

    @asynccontextmanager
    async def _watching(self, reading: _Reading, screen: LiveMarkdown) -> AsyncIterator[None]:
        """Keep the status line true while the answer comes."""
        before = (await self._engine.stats()).get("compute", {})

        async def watch() -> None:
            with contextlib.suppress(HeadraceError):  # the answer itself will say what is wrong
                while True:
                    await asyncio.sleep(STATUS_S)
                    now = (await self._engine.stats()).get("compute")
                    if reading.count and now is not None:
                        screen.status(reading.status(before, now))

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.wait((watcher,))


class _Reading:
    """An answer as far as it has come."""

    def __init__(self, parser: ReplyParser) -> None:
        self.parser = parser
        self.reasoning = self.content = ""
        self.count = 0
        self._began = self._first = time.monotonic()

    def token(self, token: int, screen: LiveMarkdown) -> None:
        """Take one token and show what it says."""
        self.count += 1
        if self.count == 1:
            self._first = time.monotonic()
        self._show(self.parser.push(token), screen)

    def finish(self, screen: LiveMarkdown, *, cut: bool) -> None:
        """Show what was held back."""
        self._show(self.parser.finish(cut=cut), screen)

    def status(self, before: dict[str, float], now: dict[str, float]) -> str:
        """Tokens, their speed, how many experts were found, and how long was waited."""
        seconds = time.monotonic() - self._first
        speed = (self.count - 1) / seconds if self.count > 1 else 0.0

        def grown(name: str) -> float:
            return now.get(name, 0.0) - before.get(name, 0.0)

        hits, misses = grown(counters.DEMAND_HITS), grown(counters.DEMAND_MISSES)
        waited = grown(counters.STALL_EXPERT_S) + grown(counters.STALL_ENGRAM_S)
        share = waited / max(time.monotonic() - self._began, 1e-9)
        found = f"{hits / (hits + misses):.0%} of experts in memory" if hits + misses else ""
        parts = (f"{self.count} tokens", f"{speed:.1f} tokens/s", found, f"{share:.0%} waiting")
        return " · ".join(part for part in parts if part)

    def _show(self, deltas: list[Delta], screen: LiveMarkdown) -> None:
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                self.reasoning += delta.text
                screen.reason(delta.text)
            elif isinstance(delta, ContentDelta):
                self.content += delta.text
                screen.say(delta.text)
