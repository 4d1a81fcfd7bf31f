"""Symptoms: a slot that is rewritten while a device still copies it, a process that looks dead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from compute.generation import TextGenerator
from compute.process import ComputeProcess
from compute.progress import ProgressPage
from protocol.layouts import Progress
from protocol.messages import Stop
from protocol.trace import Tracer
from protocol.transport import Channel
from protocol.wire import Message


class Silence:
    """A control channel on which nothing comes, and then the word to stop."""

    def __init__(self, times: int) -> None:
        self._left = times

    def receive(self, timeout: float) -> tuple[str, Message] | None:
        self._left -= 1
        return ("", Stop()) if self._left < 0 else None


def test_idle_it_lets_go_of_what_the_device_has_read_and_gives_signs_of_life() -> None:
    """A request that was cancelled leaves copies under way: the epoch is not its to move."""
    page, done = Progress.create(words_count=Progress.COUNT), []
    kept = SimpleNamespace(close=lambda: done.append("closed"))
    generator = cast(TextGenerator, SimpleNamespace(progress=ProgressPage(page), kept=kept))
    control = cast(Channel, Silence(2))
    ComputeProcess(control, generator, Tracer("test"), lambda: done.append("let go")).run()
    assert done == ["let go"] * 3 + ["closed"]
    assert page.words[Progress.EPOCH] == 0 and page.words[Progress.HEARTBEAT] > 0
