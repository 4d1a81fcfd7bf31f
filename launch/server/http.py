"""The HTTP server as a context: listening when entered, gone when left."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from launch.server.app import build_app
from launch.server.engine import Engine
from launch.server.options import ServerOptions
from protocol.errors import ResourceError

# Streams still open then are cut; the whole command has to end within two seconds.
GOODBYE_S = 1
# What the head of a request may take to come, which is a kilobyte.
HEAD_SECONDS = 30.0
# Connections over the bound that are still told so; further ones are closed unheard.
TOLD = 8
# What replacing readers, traces and snapshots have open for a moment.
RESERVED_FILES = 16


class _Protocol(H11Protocol):
    """A connection on which no whole request head comes would keep its place for ever, and uvicorn
    counts connections only as a request comes."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) >= (self.limit_concurrency or 0) + TOLD:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        else:
            self._wait_no_more()

    def _should_upgrade(self) -> bool:
        """Never: uvicorn would advise to install what speaks websockets, or speak them itself."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Server(uvicorn.Server):
    """Signals belong to the command that runs this server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def running_server(
    engine: Engine,
    options: ServerOptions,
    log: Callable[[str], None] = lambda line: None,
    listening: socket.socket | None = None,
) -> AsyncIterator[str]:
    """Serve `engine`, on `listening` where `bound_socket` was called before; gives the address.
    `log` gets a line for each answer. Raises ResourceError where the address cannot be bound."""
    app = build_app(engine, options, log)
    most = _most_connections(options.max_connections)
    if most < options.max_connections:
        log(f"connections: {most} at most; more need more open files (ulimit -n 4096)")
    config = uvicorn.Config(
        app,
        http=_Protocol,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=GOODBYE_S,
        # uvicorn refuses the one that makes this many.
        limit_concurrency=most + 1,
        server_header=False,
    )
    server = _Server(config)
    listening = listening or bound_socket(options)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if serving.done():
            serving.result()
            raise ResourceError("the HTTP server ended while it started")
        host, port = listening.getsockname()[:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        app.state.service.stop()
        server.should_exit = True
        await asyncio.wait((serving,))


def _most_connections(wanted: int) -> int:
    """As many as leave the group the files that it needs to go on."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = allowed - len(os.listdir("/proc/self/fd"))
    return max(1, min(wanted, free - TOLD - RESERVED_FILES))


def bound_socket(options: ServerOptions) -> socket.socket:
    """The address taken, for `running_server`; nobody can connect yet. Raises ResourceError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM
        )[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no host name"
        raise ResourceError(
            f"cannot listen on {options.host} port {options.port} ({reason}); "
            "choose another with --host and --port"
        ) from None
    listening.setblocking(False)
    return listening
