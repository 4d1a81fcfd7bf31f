"""`headrace serve`: the process group behind an HTTP server, until a signal or the group's end."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from launch.command_options import with_group_options
from launch.foreground import console, run_foreground, running_group
from launch.group import ProcessGroup
from launch.options import GroupOptions
from launch.ranges import Integer, Size
from launch.server.options import ServerOptions
from launch.snapshot_options import with_snapshot_options
from launch.warm_options import with_warm_options

WATCH_S = 0.25


@click.command("serve")
@with_group_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=Integer(0, 65535),
    default=8000,
    show_default=True,
    help="Port; 0 takes a free one.",
)
@click.option(
    "--api-key",
    default="",
    help="Key that clients have to send. Better in HEADRACE_API_KEY: others see command lines.",
)
@click.option(
    "--queue", type=Integer(0, 10_000), default=8, show_default=True, help="Requests that may wait."
)
@click.option(
    "--max-body",
    type=Size(1024, 1 << 40),
    default="16MiB",
    show_default=True,
    metavar="SIZE",
    help="Largest request.",
)
@click.option(
    "--max-connections",
    type=Integer(1, 10_000),
    default=256,
    show_default=True,
    help="Connections open at one time.",
)
@click.option(
    "--think/--no-think",
    default=False,
    show_default=True,
    help="Whether chats that do not say reason before they answer.",
)
@with_snapshot_options
@with_warm_options(warm=True)
@click.option("--model-name", default="", help="Name in the API.  [default: that of DIR]")
@click.option("--quiet", is_flag=True, help="No line for each answer.")
def serve_command(group: GroupOptions, quiet: bool, **server: Any) -> None:
    """Serve the checkpoint in DIR to OpenAI clients and browsers.

    \b
    headrace serve DIR                         http://127.0.0.1:8000, page and /v1
    headrace serve DIR --port 9000 --cache 64GiB
    HEADRACE_API_KEY=… headrace serve DIR --host 0.0.0.0
    """
    # An HTTP server's libraries are many modules, which no other command should wait for.
    from launch.server.http import bound_socket, running_server

    options = ServerOptions(**server)
    # Before the weights, whose loading takes minutes.
    listening = bound_socket(options)

    async def main() -> None:
        async with running_group(group) as running:
            log = _silent if quiet else _log
            async with running_server(running, options, log, listening) as url:
                console.print(f"page: {url}    OpenAI base URL: {url}/v1    Ctrl-C ends it")
                await _until_failure(running)

    run_foreground(main)


def _log(line: str) -> None:
    console.print(line, markup=False)


def _silent(line: str) -> None:
    pass


async def _until_failure(group: ProcessGroup) -> None:
    """Returns never; raises what ended the group."""
    while group.failure is None:
        await asyncio.sleep(WATCH_S)
    raise group.failure
