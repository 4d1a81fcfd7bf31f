"""The server's state and its way from a checked request to an answer.

Owns the line, the counts, and the tasks that make answers: a task ends with its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from compute.text import TokenBytes
from launch.chat_format.vocabulary import ChatTokens, Vocabulary
from launch.options import GenerateOptions
from launch.server.activity import Activity
from launch.server.answers import Answer, Batch, Reader
from launch.server.bodies import Sampling
from launch.server.connection import ClientLeft, EventStream, while_connected
from launch.server.engine import Engine
from launch.server.errors import ApiError
from launch.server.options import ServerOptions
from launch.server.sampling_defaults import SamplingDefaults
from launch.server.shapes import Shape
from launch.server.translate import Translator
from launch.server.waiting_line import LineFull, WaitingLine
from protocol.errors import CheckpointError

# How long a stream may be silent; a comment then keeps proxies from closing it.
SILENCE_S = 10.0


class Service:
    """One engine behind one server."""

    def __init__(self, engine: Engine, options: ServerOptions, log: Callable[[str], None]) -> None:
        """Raises CheckpointError for an unusable generation_config.json."""
        self._log = log
        checkpoint = engine.options.checkpoint
        self.engine = engine
        self.options = options
        self.model = options.model_name or checkpoint.resolve().name
        self.line = WaitingLine(options.queue)
        self.activity = Activity()
        self._making: set[Answer] = set()
        self.vocabulary = Vocabulary(engine.tokenizer, engine.config)
        self.token_bytes = TokenBytes(engine.tokenizer, [engine.config.eos_token_id])
        self.translator = Translator(
            engine.config,
            self.vocabulary,
            _chat_tokens(self.vocabulary),
            SamplingDefaults.load(checkpoint),
            min(engine.options.max_context, engine.config.max_position_embeddings),
            options.think,
        )

    def stop(self) -> None:
        """End every answer now, telling its client why."""
        for answer in self._making:
            answer.fail(ApiError(503, "the server is stopping"))

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for any model but the one served."""
        if name != self.model:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; this server has {self.model!r}",
                param="model",
                code="model_not_found",
            )

    def describe_model(self) -> dict[str, Any]:
        """The entry of `/v1/models`; `defaults` apply where a request does not say."""
        return {
            "id": self.model,
            "object": "model",
            "created": int(self.activity.started),
            "owned_by": "headrace",
            "max_model_len": self.translator.context,
            "defaults": {
                **self.translator.defaults.as_dict(),
                "thinking": self.translator.think,
            },
        }

    async def respond(
        self,
        request: Request,
        body: Sampling,
        options: GenerateOptions,
        reader: Reader,
        shape: Shape,
    ) -> Response:
        """Make the answer and send it the way `body` asks for. Raises ApiError before the first
        byte; a stream that fails later carries the error."""
        answer = Answer(options, body.stop, reader)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            resources = AsyncExitStack()
            # Entered here, so that a full line is an HTTP status and not an event.
            await resources.enter_async_context(self._running(answer))
            return EventStream(_events(answer, shape, usage), resources)
        async with self._running(answer):
            try:
                whole = await while_connected(request.receive, _collect(answer, shape))
            except ClientLeft:
                return Response(status_code=499)
        return JSONResponse(whole)

    @asynccontextmanager
    async def _running(self, answer: Answer) -> AsyncIterator[None]:
        """The answer being made by a task that does not outlive this context."""
        try:
            turn = self.line.join()
        except LineFull as full:
            self.activity.count("refused")
            retry = {"Retry-After": str(full.retry_after)}
            raise ApiError(429, str(full), code="queue_full", headers=retry) from None
        task = asyncio.create_task(answer.run(self.engine, self.line, turn, self.activity))
        # A task cancelled before its first step runs nothing, so its place is given back here too.
        task.add_done_callback(lambda _: self.line.leave(turn))
        self._making.add(answer)
        try:
            yield
        finally:
            self._making.discard(answer)
            task.cancel()
            await asyncio.wait((task,))
            self._count(answer)

    def _count(self, answer: Answer) -> None:
        if answer.error is not None:
            self.activity.count("error")
            self._log(f"error: {answer.error}")
        elif answer.outcome is None:
            self.activity.count("left")
            self._log("the client left")
        else:
            self.activity.count(answer.outcome.finish_reason)
            self._log(str(answer.outcome))


async def _events(answer: Answer, shape: Shape, include_usage: bool) -> AsyncIterator[Any]:
    """What a stream carries, in the terms of EventStream."""
    try:
        for chunk in shape.opening():
            yield chunk
        while (batch := await answer.take(SILENCE_S)) is not None:
            if not batch.deltas and not batch.logprobs:
                yield ""
                continue
            for chunk in shape.chunks(batch):
                yield chunk
        assert answer.outcome is not None
        for chunk in shape.closing(answer.outcome, include_usage):
            yield chunk
        yield "[DONE]"
    except ApiError as error:
        yield error.body()


async def _collect(answer: Answer, shape: Shape) -> dict[str, Any]:
    whole = Batch()
    while (batch := await answer.take(SILENCE_S)) is not None:
        whole.deltas += batch.deltas
        whole.logprobs += batch.logprobs
    assert answer.outcome is not None
    return shape.whole(whole, answer.outcome)


def _chat_tokens(vocabulary: Vocabulary) -> ChatTokens | None:
    try:
        return vocabulary.chat_tokens()
    except CheckpointError:
        return None
