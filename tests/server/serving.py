"""A real HTTP server on a free port of this machine, in the test's own event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from launch.server.engine import Engine
from launch.server.http import running_server
from launch.server.options import ServerOptions

P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@dataclass(frozen=True, slots=True)
class Served:
    """A running server: its address, and the clients for it."""

    url: str
    client: AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    async def chat(self, text: str = "hi", **more: Any) -> Any:
        """One chat completion by the official client."""
        return await self.client.chat.completions.create(
            model="mini", messages=[{"role": "user", "content": text}], **more
        )

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **more)


def chat_body(**more: Any) -> dict[str, Any]:
    """The smallest chat request, and `more`."""
    return {"model": "mini", "messages": [{"role": "user", "content": "hi"}], **more}


@asynccontextmanager
async def serving(engine: Engine, **options: Any) -> AsyncIterator[Served]:
    async with running_server(engine, ServerOptions(port=0, **options)) as url:
        key = options.get("api_key") or "none"
        # Plain HTTP needs no certificates, whose loading takes longer than most of these tests.
        async with (
            httpx.AsyncClient(base_url=url, timeout=30, verify=False) as http,
            DefaultAsyncHttpxClient(verify=False) as inner,
        ):
            client = AsyncOpenAI(
                base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30, http_client=inner
            )
            yield Served(url, client, http)
