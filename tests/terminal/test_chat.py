"""The terminal chat: keys and commands do what they say, on a real terminal and through a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.history import InMemoryHistory

from launch.chat import parse_effort
from launch.chat_format.conversation import Message
from launch.terminal.dialogue import Dialogue
from launch.terminal.input import PipedLines, chat_history
from launch.terminal.live_markdown import split_finished
from protocol.errors import UsageError
from tests.golden.cases import MINI
from tests.terminal.on_a_terminal import ROOT, on_a_terminal, private

__all__ = ["private"]
CHAT = ("chat", str(MINI), "--device", "cpu", "--threads", "1", "--temperature", "0")


# Greedy, from an empty conversation, it answers the two questions below with over 700 tokens:
# Ctrl-C always meets an answer that is still coming.
TALKATIVE = ("chat", str(ROOT / "demo"), *CHAT[2:])


def test_ctrl_c_stops_the_answer_and_not_the_program(private: dict[str, str]) -> None:
    with on_a_terminal(*TALKATIVE, environment=private) as terminal:
        terminal.wait_for("> ")
        terminal.type("Go on and on.\r")
        terminal.wait_for("tokens/s")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        terminal.type("\x03")
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for("> ")
        saved = Path(private["HOME"]) / "talk.json"
        terminal.type(f"/save {saved}\r")
        terminal.wait_for("2 messages saved")
        terminal.wait_for("> ")
        first = json.loads(saved.read_text())["messages"]
        assert first[0]["content"] == "Go on and on."
        assert first[1]["content"], "what had come before Ctrl-C is kept"
        terminal.type("/clear\r")
        terminal.wait_for("> ")
        terminal.type("one\x1b\rtwo\r")
        terminal.wait_for("tokens/s")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        terminal.type(f"/save {saved}\r")
        terminal.wait_for("2 messages saved")
        terminal.wait_for("> ")
        terminal.type("\x1b[31m\x04")
        assert terminal.exit_code() == 0
        assert json.loads(saved.read_text())["messages"][0]["content"] == "one\ntwo"
    history = Path(private["HOME"]) / ".local" / "state" / "headrace" / "chat-history"
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_answered_line_by_line(tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    said = f"Hello\n/think low\nAgain\n/stats\n/save {saved}\n/clear\n/load {saved}\n"
    said += "/nope\n/save ~nobody-here/x\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEADRACE_SNAPSHOT_BYTES": "0"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *CHAT, "--max-tokens", "5"],
        input=said,
        capture_output=True,
        text=True,
        timeout=90,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    assert "tokens/s" in result.stdout
    assert "4 messages saved" in result.stdout and "4 messages loaded" in result.stdout
    assert "'/nope' is no command" in result.stdout
    assert "~nobody-here/x: cannot be written" in result.stdout
    messages = json.loads(saved.read_text())["messages"]
    assert messages[1]["content"] and messages[3]["reasoning_content"]
    assert "\x1b" not in result.stdout, "no colours without a terminal"


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The writing end of what is standard input now."""
    receiving, sending = os.pipe()
    with open(receiving, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield sending
        # A second closing, where a test has closed it, is harmless here and only here.
        with contextlib.suppress(OSError):
            os.close(sending)


def test_a_silent_pipe_holds_up_the_end(pipe: int) -> None:
    async def interrupted() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await PipedLines().next()

    # Lets a run that does wait for the pipe end, and fail.
    relief = threading.Timer(10.0, os.close, (pipe,))
    relief.start()
    begin = time.monotonic()
    asyncio.run(interrupted())
    relief.cancel()
    assert time.monotonic() - begin < 5.0


def test_a_line_that_is_not_utf_8_ends_the_chat(pipe: int) -> None:
    os.write(pipe, b"a\xffb\n")
    os.close(pipe)

    async def lines() -> str:
        reader = PipedLines()
        first = await reader.next()
        with pytest.raises(EOFError):
            await reader.next()
        return first

    assert asyncio.run(lines()) == "a\ufffdb"


def test_a_home_that_cannot_be_written_is_needed_for_a_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nothing")
    assert isinstance(chat_history(), InMemoryHistory)


def test_a_dialogue_comes_back_from_its_file(tmp_path: Path) -> None:
    dialogue = Dialogue("Be brief.")
    dialogue.ask("one?")
    dialogue.answer("1", "counting 🌍")
    dialogue.save(tmp_path / "x.json")
    again = Dialogue()
    again.load(tmp_path / "x.json")
    assert again.system == "Be brief."
    assert again.turns == [Message("user", "one?"), Message("assistant", "1", "counting 🌍")]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"messages": [1]}', '{"messages": [{"role": "king", "content": "x"}]}'],
)
def test_a_file_that_is_no_dialogue_changes_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    dialogue = Dialogue("s", None, [Message("user", "a")])
    with pytest.raises(UsageError, match=r"x\.json"):
        dialogue.load(path)
    with pytest.raises(UsageError, match=r"none\.json"):
        dialogue.load(tmp_path / "none.json")
    assert (dialogue.system, len(dialogue.turns)) == ("s", 1)


def test_what_is_no_file_is_read_without_end() -> None:
    with pytest.raises(UsageError, match="not a file"):
        Dialogue().load(Path("/dev/zero"))


def test_what_is_no_utf_8_ends_the_conversation(private: dict[str, str]) -> None:
    with on_a_terminal(*CHAT, "--readers", "1", environment=private) as terminal:
        terminal.wait_for("> ")
        terminal.type("caf\udce9\r")
        terminal.wait_for("is not UTF-8 text")
        terminal.wait_for("> ")
        terminal.type("/exit\r")
        assert terminal.exit_code() == 0


def test_a_question_without_an_answer_is_taken_back() -> None:
    dialogue = Dialogue()
    dialogue.ask("a")
    dialogue.answer("b", "")
    dialogue.take_back()
    assert len(dialogue.turns) == 2
    dialogue.ask("c")
    dialogue.take_back()
    assert [turn.text for turn in dialogue.turns] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n", "one\n\n"),
        ("a\n```\nx\n\ny\n", ""),
        ("a\n\n```py\nx\n\ny\n```\n\nb", "a\n\n```py\nx\n\ny\n```\n\n"),
        ("~~~\n```\n\n", ""),
    ],
)
def test_only_blocks_that_cannot_change_are_finished(text: str, done: str) -> None:
    assert split_finished(text) == (done, text.removeprefix(done))


def test_effort_is_a_name_or_a_number() -> None:
    assert [parse_effort(t) for t in ("off", "on", "low", "max", "17")] == [None, 75, 50, 100, 17]
    for text in ("0", "101", "very", "٣", "9" * 5000):
        with pytest.raises(UsageError, match=text[:80]):
            parse_effort(text)
