"""One answer being made: the engine's tokens read into text, and kept until its reader takes them.

Owns the meeting of a fast engine and a slow reader. Promises: the engine never waits for a reader;
what waits for one is merged, so an answer holds no more memory than its own text; stop strings end
the answer text wherever they fall across tokens, and never cut reasoning or calls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from compute.text import StopStrings, TextStream, TokenBytes
from launch.chat_format.reply import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    Delta,
    ReasoningDelta,
)
from launch.options import GenerateOptions
from launch.server.activity import Activity, WatchedRequest
from launch.server.engine import Engine
from launch.server.errors import ApiError, engine_error
from launch.server.waiting_line import Turn, WaitingLine
from protocol import counters
from protocol.errors import HeadraceError, failure
from protocol.messages import Finished, PrefillProgress, TokenEvent


class Reader(Protocol):
    """Reads a reply token by token: a `ReplyParser`, or `PlainReader`."""

    abandoned: bool
    content_characters: int

    @property
    def in_content(self) -> bool: ...

    @property
    def in_reasoning(self) -> bool: ...

    @property
    def complete_calls(self) -> int: ...

    def push(self, token: int) -> list[Delta]: ...

    def finish(self, *, cut: bool = False) -> list[Delta]: ...


class PlainReader:
    """A reply that is only text; control tokens appear as they are spelled."""

    abandoned = False
    in_reasoning = False
    complete_calls = 0

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._text = TextStream(token_bytes)
        self.in_content = True
        self.content_characters = 0

    def push(self, token: int) -> list[Delta]:
        """The text that became certain with `token`."""
        # Only the end of the sequence has no bytes.
        self.in_content = bool(self._token_bytes.of(token))
        text = self._text.push(token)
        self.content_characters += len(text)
        return [ContentDelta(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """Nothing is held back."""
        return []


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of the answer text, with its alternatives as (token, log-probability), and how many
    characters of the answer stand before it."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    offset: int


@dataclass(slots=True)
class Batch:
    """What a reader takes at once."""

    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer ended. `figures` are the engine's for this request, none where it was cut."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int
    reasoning_tokens: int
    figures: dict[str, float]

    def __str__(self) -> str:
        speed = self.figures.get(counters.TOKENS_PER_S, 0.0)
        rate = f" at {speed:.1f} tokens/s" if speed else ""
        return (
            f"{self.prompt_tokens} prompt tokens ({self.reused_tokens} reused), "
            f"{self.completion_tokens} tokens{rate}, {self.finish_reason}"
        )


class Answer:
    """One answer. `run` makes it; `take` hands it out; both may be in different tasks."""

    def __init__(self, options: GenerateOptions, stop: list[str], reader: Reader) -> None:
        self._options = options
        self._reader = reader
        self._stop_texts = stop
        self._stops = StopStrings(stop)
        self._batch = Batch()
        # Log-probabilities whose text is not certain yet, with the character each ends at.
        self._pending: deque[tuple[int, TokenLogprob]] = deque()
        self._said = 0
        self._changed = asyncio.Event()
        self._tokens = self._reasoning_tokens = 0
        self._reused = 0
        self.outcome: Outcome | None = None
        self.error: ApiError | None = None

    async def run(self, engine: Engine, line: WaitingLine, turn: Turn, activity: Activity) -> None:
        """Wait for the turn, generate, and end in `outcome` or `error`; cancel to stop early."""
        try:
            await turn.wait()
            with activity.request(len(self._options.prompt)) as watched:
                self.outcome = await self._generate(engine, watched)
        except ApiError as error:
            self.error = error
        except HeadraceError as error:
            self.error = engine_error(error)
        finally:
            line.leave(turn)
            self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End the answer with `error` instead of what it would still have become."""
        if self.outcome is None and self.error is None:
            self.error = error
            self._changed.set()

    async def take(self, timeout: float) -> Batch | None:
        """What has come since the last call, after at most `timeout` seconds maybe nothing; None
        at the end. Raises ApiError where the answer failed."""
        if self._is_empty() and self.outcome is None and self.error is None:
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                return Batch()
        self._changed.clear()
        if self._is_empty():
            if self.error is not None:
                raise self.error
            return None if self.outcome is not None else Batch()
        batch, self._batch = self._batch, Batch()
        return batch

    async def _generate(self, engine: Engine, watched: WatchedRequest) -> Outcome:
        async with aclosing(engine.generate(self._options)) as events:
            async for event in events:
                match event:
                    case PrefillProgress(_, done, total, reused):
                        self._reused = reused
                        watched.prefill(done, total, reused)
                    case TokenEvent():
                        watched.token()
                        self._take_token(event)
                        if self._stops.met or self._reader.abandoned:
                            # Left early, the engine stops after the token at hand.
                            return self._end("stop", {})
                    case Finished():
                        if event.reason == "error":
                            raise failure(event.failure, event.error)
                        return self._end(event.reason, event.figures)
        raise ApiError(500, "the engine ended the answer without saying why")

    def _take_token(self, event: TokenEvent) -> None:
        self._tokens += 1
        self._reasoning_tokens += self._reader.in_reasoning
        in_content, before = self._reader.in_content, self._reader.content_characters
        deltas = self._reader.push(event.token)
        if event.logprob is not None and in_content and self._reader.in_content:
            top = list(zip(event.top_ids, event.top_logprobs, strict=True))
            entry = TokenLogprob(event.token, event.logprob, top, before)
            self._pending.append((self._reader.content_characters, entry))
        while self._pending and self._pending[-1][0] > self._reader.content_characters:
            self._pending.pop()  # the blank line before a block of calls was markup after all
        self._put(deltas)

    def _end(self, reason: str, figures: dict[str, float]) -> Outcome:
        self._put(self._reader.finish(cut=reason == "length"))
        held = self._stops.finish()
        if held:
            self._say(ContentDelta(held))
        self._release_logprobs()
        if reason == "stop" and self._reader.complete_calls:
            reason = "tool_calls"
        return Outcome(
            reason,
            len(self._options.prompt),
            self._tokens,
            self._reused,
            self._reasoning_tokens,
            figures,
        )

    def _put(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                certain = self._stops.push(delta.text)
                if certain:
                    self._say(ContentDelta(certain))
                continue
            held = self._stops.finish()
            if held:
                # Other parts follow, so no stop string goes on across them.
                self._say(ContentDelta(held))
                self._stops = StopStrings(self._stop_texts)
            self._say(delta)
        self._release_logprobs()

    def _release_logprobs(self) -> None:
        while self._pending and self._pending[0][0] <= self._said:
            self._batch.logprobs.append(self._pending.popleft()[1])
            self._changed.set()

    def _say(self, delta: Delta) -> None:
        if isinstance(delta, ContentDelta):
            self._said += len(delta.text)
        last = self._batch.deltas[-1] if self._batch.deltas else None
        merged = _merged(last, delta)
        if merged is not None:
            self._batch.deltas[-1] = merged
        else:
            self._batch.deltas.append(delta)
        self._changed.set()

    def _is_empty(self) -> bool:
        return not self._batch.deltas and not self._batch.logprobs


def _merged(last: Delta | None, delta: Delta) -> Delta | None:
    """Both in one, or None where they do not belong together."""
    if isinstance(delta, CallStarted) or type(last) is not type(delta):
        return None
    if isinstance(delta, ArgumentsDelta):
        assert isinstance(last, ArgumentsDelta)
        if last.index != delta.index:
            return None
        return replace(last, text=last.text + delta.text)
    assert isinstance(last, ReasoningDelta | ContentDelta)
    return replace(last, text=last.text + delta.text)
