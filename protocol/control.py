"""What every child answers the supervisor: its figures, a trace begun or ended, and its own end.

Owns the child's half of the control conversation that is the same for all. What more a child is
told (compute's requests) it takes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from protocol.messages import (
    StatsReply,
    StatsRequest,
    Stop,
    TraceStart,
    TraceStop,
    TraceStopped,
)
from protocol.transport import Channel
from protocol.wire import Message

#: The messages that `ControlAnswers` takes; a child's control channel accepts them.
COMMON = (Stop, StatsRequest, TraceStart, TraceStop)


class Traced(Protocol):
    """A `protocol.trace.Tracer`, or what wraps one."""

    def start(self, path: str) -> None:
        """Write to `path` from now on."""
        ...

    def stop(self) -> None:
        """Complete the file, if there is one."""
        ...


class ControlAnswers:
    """One child's answers over `channel`. `figures` gives its counters, `stop` has it end."""

    def __init__(
        self,
        channel: Channel,
        process: str,
        trace: Traced,
        figures: Callable[[], Mapping[str, float]],
        stop: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._process = process
        self._trace = trace
        self._figures = figures
        self._stop = stop

    def take(self, message: Message) -> None:
        """Do what one of the `COMMON` messages asks."""
        match message:
            case Stop():
                self._stop()
            case StatsRequest(request):
                figures = dict(self._figures())
                self._channel.send(StatsReply(request, self._process, figures))
            case TraceStart(path):
                self._trace.start(path)
            case TraceStop():
                self._trace.stop()
                self._channel.send(TraceStopped(self._process))
