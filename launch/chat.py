"""`headrace chat`: a conversation in the terminal, with the process group in the background.

Promises: Ctrl-C stops the answer and not the program; /exit, Ctrl-D and SIGTERM end everything
within two seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from launch.chat_format.conversation import DEFAULT_EFFORT, EFFORTS
from launch.command_options import with_group_options
from launch.foreground import run_foreground, running_group
from launch.group import ProcessGroup
from launch.options import GroupOptions
from launch.ranges import COUNT, SEED, TEMPERATURE, TOP_P
from launch.snapshot_options import with_snapshot_options
from launch.summary import run_figures, run_table
from launch.terminal.dialogue import Dialogue
from launch.warm_options import with_warm_options
from protocol.errors import HeadraceError, ProcessDied, UsageError

if TYPE_CHECKING:
    from launch.terminal.input import Lines
    from launch.terminal.talker import Talker

COMMANDS = {
    "/clear": "forget the conversation",
    "/save FILE": "write the conversation as JSON",
    "/load FILE": "go on with a saved one",
    "/system TEXT": "what the model is told at the start",
    "/think off|low|high|max|1-100": "whether, and how much, it reasons first",
    "/stats": "figures of the last answer",
    "/help": "this list",
    "/exit": "leave, as Ctrl-D does",
}


@click.command("chat")
@with_group_options
@with_snapshot_options
@with_warm_options(warm=True)
@click.option("--system", default="", help="What the model is told at the start.")
@click.option("--think", default="off", show_default=True, help="off, low, high, max, or 1 to 100.")
@click.option("--max-tokens", type=COUNT, help="Longest answer.  [default: what the context holds]")
@click.option("--temperature", type=TEMPERATURE, help="0 takes the likeliest token.")
@click.option("--top-p", type=TOP_P, help="Choose among this much probability.")
@click.option("--seed", "sampling_seed", type=SEED, help="The same seed gives the same answers.")
def chat_command(
    group: GroupOptions, system: str, think: str, sampling_seed: int | None, **choosing: Any
) -> None:
    """Talk to the checkpoint in DIR.

    Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer; /help lists the commands.
    """
    # A line editor and a Markdown renderer, which no other command should wait for.
    from launch.terminal.input import EditedLines, PipedLines
    from launch.terminal.talker import Choosing, Talker

    dialogue = Dialogue(system, parse_effort(think))
    chosen = Choosing(seed=sampling_seed, **choosing)
    console = Console(highlight=False)

    async def main() -> None:
        async with running_group(group) as running:
            talker = Talker(running, dialogue, console, chosen)
            interactive = sys.stdin.isatty() and sys.stdout.isatty()
            names = [command.split()[0] for command in COMMANDS]
            lines: Lines = EditedLines(names) if interactive else PipedLines()
            if interactive:
                console.print("[dim]/help lists the commands, Ctrl-C stops an answer[/dim]")
            await _converse(running, talker, lines, console)

    run_foreground(main)


async def _converse(group: ProcessGroup, talker: Talker, lines: Lines, console: Console) -> None:
    while True:
        try:
            text = (await lines.next()).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("[dim]/exit or Ctrl-D leaves[/dim]")
            continue
        if text == "/exit":
            return
        try:
            if text.startswith("/"):
                await _obey(text, group, talker, console)
            elif text:
                await _until_interrupted(talker.ask(text), console)
        except ProcessDied:
            raise
        except HeadraceError as error:
            if group.failure is not None:
                raise
            console.print(f"{error}", style="red", markup=False)


async def _until_interrupted(work: Awaitable[None], console: Console) -> None:
    """Run `work`; Ctrl-C cancels it and nothing else."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()

    # Replaces the handler that would end the program; while a line is edited Ctrl-C is a key.
    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
        console.print("[dim]stopped[/dim]")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, HeadraceError):
            await task


async def _obey(text: str, group: ProcessGroup, talker: Talker, console: Console) -> None:
    command, _, rest = text.partition(" ")
    rest, dialogue = rest.strip(), talker.dialogue
    match command:
        case "/clear":
            dialogue.turns.clear()
        case "/save" if rest:
            dialogue.save(Path(os.path.expanduser(rest)))
            console.print(f"{len(dialogue.turns)} messages saved", style="dim")
        case "/load" if rest:
            dialogue.load(Path(os.path.expanduser(rest)))
            console.print(f"{len(dialogue.turns)} messages loaded", style="dim")
        case "/system":
            dialogue.system = rest
        case "/think" if rest:
            dialogue.effort = parse_effort(rest)
        case "/stats":
            if talker.last is None:
                raise UsageError("nothing has been answered whole yet")
            console.print(run_table(run_figures("", talker.last, await group.stats())))
        case "/help":
            for name, says in COMMANDS.items():
                console.print(f"{name:32} {says}", style="dim", markup=False)
        case _:
            raise UsageError(f"{text!r} is no command; /help lists them, with what they need")


def parse_effort(text: str) -> int | None:
    """`off`, a name, or a number from 1 to 100; raises UsageError."""
    if text == "off":
        return None
    if text in EFFORTS or text == "on":
        return EFFORTS.get(text, DEFAULT_EFFORT)
    if re.fullmatch(r"[0-9]{1,3}", text) and 1 <= int(text) <= 100:
        return int(text)
    raise UsageError(f"{text!r}: expected off, {', '.join(EFFORTS)}, or a number from 1 to 100")
