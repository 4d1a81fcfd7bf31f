"""One client's connection: its body within bounds, its stream at its own pace, its going noticed.

Promises: no more of a body is kept than the limit; a client that leaves ends the work done for it;
one that reads slowly blocks only itself, and one that stopped reading is let go.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from launch.server.errors import ApiError

BODY_SECONDS = 60.0
# A body over the limit is still taken in and thrown away: a client that is cut off while it sends
# sees a broken connection instead of the answer.
DISCARD_SECONDS = 10.0
# A reader that takes nothing for so long has gone without saying so.
SEND_SECONDS = 120.0

T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed its connection."""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; raises ApiError 413 where it is larger than `limit` bytes."""
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and int(stated) > limit:
        await _discard(request)
        raise _too_large(limit, int(stated))
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} s") from None
    if len(body) > limit:
        await _discard(request)
        raise _too_large(limit, len(body))
    return bytes(body)


async def _discard(request: Request) -> None:
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _too_large(limit: int, size: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {size} bytes or more, this server takes {limit}; send less, or start it "
        "with a larger --max-body",
        code="body_too_large",
        headers={"Connection": "close"},
    )


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; raises ClientLeft, having cancelled it, where the client leaves."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        for pending in (task, leaving):
            pending.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: each item of `events` is a JSON object, "[DONE]", or "" for a comment
    that keeps the connection alive. `resources` are closed at the end, whatever ends it."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], resources: AsyncExitStack) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            try:
                await while_connected(receive, self._write(send))
            except (ClientLeft, TimeoutError):
                return

    async def _write(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async for event in self._events:
            async with asyncio.timeout(SEND_SECONDS):
                await send(
                    {"type": "http.response.body", "body": _encode(event), "more_body": True}
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _encode(event: Any) -> bytes:
    if event == "":
        return b": still here\n\n"
    data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
    return f"data: {data}\n\n".encode()
