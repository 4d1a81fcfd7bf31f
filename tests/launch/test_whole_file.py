"""What stood in a file stays there until what takes its place is whole."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from launch.terminal.dialogue import Dialogue
from launch.whole_file import whole_file
from protocol.errors import UsageError


def test_a_full_disk_takes_the_conversation_that_was_saved_before(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    dialogue = Dialogue("Be brief.")
    dialogue.save(path)
    before = path.read_text()
    dialogue.ask("x" * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(UsageError, match="cannot be written"):
            dialogue.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == before and os.listdir(tmp_path) == ["talk.json"]


def test_work_that_fails_takes_what_was_written_before(tmp_path: Path) -> None:
    path, link = tmp_path / "digests", tmp_path / "link"
    path.write_text("good")
    link.symlink_to(path)
    with pytest.raises(KeyboardInterrupt), whole_file(link) as file:
        file.write("half")
        raise KeyboardInterrupt
    assert path.read_text() == "good"
    with whole_file(link) as file:
        file.write("new")
    assert link.is_symlink() and path.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["digests", "link"]


def test_a_pipe_is_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as file:
        file.write("through")
    assert os.read(reading, 100) == b"through" and pipe.is_fifo()
    os.close(reading)
