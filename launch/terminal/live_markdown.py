"""Markdown on a terminal while it is still being written.

Owns the moving end of an answer. Promises: a finished block is printed once and stays as it is; the
block being written is redrawn in place and never grows beyond the window; without a terminal the
text goes out as it comes, unchanged.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

FENCES = ("```", "~~~")
# Lines of the window left to the status line and what stands above.
MARGIN = 3


class LiveMarkdown:
    """Use as a context for one answer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reasoning = self._content = ""
        self._status = ""
        self._live = Live(
            console=console, transient=True, auto_refresh=False, vertical_overflow="crop"
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._print(self._reasoning, self._content)
        else:
            self._console.print()

    def reason(self, text: str) -> None:
        """More reasoning."""
        if not self._console.is_terminal:
            return
        self._reasoning += text
        done, self._reasoning = split_finished(self._reasoning)
        self._print(done, "")
        self._refresh()

    def say(self, text: str) -> None:
        """More of the answer."""
        if not self._console.is_terminal:
            self._console.out(text, end="", highlight=False)
            self._console.file.flush()
            return
        if self._reasoning:
            self._print(self._reasoning, "")
            self._reasoning = ""
        self._content += text
        done, self._content = split_finished(self._content)
        self._print("", done)
        self._refresh()

    def status(self, text: str) -> None:
        """The line below the answer."""
        if self._console.is_terminal and text != self._status:
            self._status = text
            self._refresh()

    def _print(self, reasoning: str, content: str) -> None:
        if reasoning.strip():
            self._console.print(_thought(reasoning))
        if content.strip():
            self._console.print(Markdown(content), "")

    def _refresh(self) -> None:
        parts: list[_Tail | Text] = []
        if self._reasoning.strip():
            parts.append(_Tail(_thought(self._reasoning)))
        if self._content.strip():
            parts.append(_Tail(Markdown(self._content)))
        self._live.update(Group(*parts, Text(self._status, style="dim")), refresh=True)


class _Tail:
    """The last lines of something that may be taller than the window."""

    def __init__(self, inner: Markdown | Padding) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._inner, options, pad=False)
        for line in lines[-max(1, console.height - MARGIN) :]:
            yield from line
            yield Segment.line()


def _thought(text: str) -> Padding:
    return Padding(Text(text.strip("\n"), style="dim italic"), (0, 0, 1, 2))


def split_finished(text: str) -> tuple[str, str]:
    """(blocks that no further text can change, the rest): cut after the last blank line that is
    not inside fenced code."""
    position = cut = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        opening = line.lstrip()[:3]
        if fence:
            fence = "" if opening == fence else fence
        elif opening in FENCES:
            fence = opening
        elif not line.strip() and line.endswith("\n"):
            cut = position
    return text[:cut], text[cut:]
