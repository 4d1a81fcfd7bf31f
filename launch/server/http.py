"""The HTTP server as a context: listening when entered, gone when left."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from launch.server.app import build_app
from launch.server.engine import Engine
from launch.server.options import ServerOptions
from protocol.errors import ResourceError

# Streams still open then are cut; the whole command has to end within two seconds.
GOODBYE_S = 1


class _Server(uvicorn.Server):
    """Signals belong to the command that runs this server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def running_server(
    engine: Engine, options: ServerOptions, log: Callable[[str], None] = lambda line: None
) -> AsyncIterator[str]:
    """Serve `engine`; gives the address. `log` gets a line for each answer. Raises ResourceError
    where the address cannot be bound."""
    app = build_app(engine, options, log)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=GOODBYE_S,
        limit_concurrency=options.max_connections,
        server_header=False,
    )
    server = _Server(config)
    listening = _listen(options)
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


def _listen(options: ServerOptions) -> socket.socket:
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
