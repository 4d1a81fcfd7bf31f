"""Where a person's lines come from: an editor line with history, or a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import threading
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.patch_stdout import patch_stdout

from launch.user_directories import user_directory


class Lines(Protocol):
    """Gives what a person writes. EOFError at the end, KeyboardInterrupt for Ctrl-C."""

    async def next(self) -> str: ...


class PipedLines:
    """One message a line of standard input; what is not UTF-8 in it becomes U+FFFD."""

    def __init__(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")

    async def next(self) -> str:
        loop = asyncio.get_running_loop()
        coming: asyncio.Future[str] = loop.create_future()

        def take(line: str) -> None:
            if not coming.done():
                coming.set_result(line)

        def read() -> None:
            line = sys.stdin.readline()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(take, line)

        # The loop's own threads are waited for at its end, and a pipe may stay silent for ever.
        threading.Thread(target=read, daemon=True, name="standard input").start()
        line = await coming
        if not line:
            raise EOFError
        return line.rstrip("\n")


class EditedLines:
    """Enter sends, Alt-Enter begins a new line, arrows go through the history."""

    def __init__(self, commands: list[str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            message=HTML("<b><ansiblue>&gt; </ansiblue></b>"),
            prompt_continuation="  ",
            multiline=True,
            key_bindings=_bindings(),
            history=chat_history(),
            completer=WordCompleter(commands, sentence=True),
            complete_while_typing=False,
        )

    async def next(self) -> str:
        # What processes say meanwhile goes above the line being edited.
        with patch_stdout(raw=True):
            text: str = await self._session.prompt_async()
            return text


def chat_history() -> History:
    """What was written before, and is kept where that can be."""
    try:
        return FileHistory(str(history_file()))
    except OSError:
        return InMemoryHistory()  # a home that cannot be written


def history_file() -> Path:
    """The user's own, readable by nobody else."""
    path = user_directory("XDG_STATE_HOME", ".local/state") / "chat-history"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    return path


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("escape", "c-j")  # the same, typed while the answer was still coming
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add(Keys.Vt100MouseEvent)
    def colour(event: KeyPressEvent) -> None:
        """Coloured text, where pasting is as typing; the library's own handler breaks on it."""

    return bindings
