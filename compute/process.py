"""The compute process: takes requests from the supervisor and answers them, one at a time.

Owns the queue of requests; what answers them is put together in `compute.assembly`. Started by the
supervisor as `python -m protocol compute.process PIPE PARENT_PID`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

import torch
import zmq

from compute.assembly import NAME, assemble
from compute.generation import Event, TextGenerator
from protocol import counters
from protocol.control import COMMON, ControlAnswers
from protocol.errors import FailureKind
from protocol.lifecycle import run_child
from protocol.messages import Cancel, Finished, Generate, Hello, Ready
from protocol.specs import ComputeSpec
from protocol.trace import Tracer
from protocol.transport import Channel
from protocol.wire import Message

CONTROL = (Generate, Cancel, *COMMON)
# Requests that wait beside the one at hand; who queues people's requests is the supervisor.
QUEUED_REQUESTS = 8
IDLE_WAKE_S = 0.1
# How long a full queue of events is left alone before the next try.
DELIVERY_PAUSE_S = 0.005


class ComputeProcess:
    """Owns the control socket's side of requests for the life of the process."""

    def __init__(
        self,
        control: Channel,
        generator: TextGenerator,
        tracer: Tracer,
        let_go: Callable[[], object],
    ) -> None:
        """`let_go` gives up every slot of the arena, once the device has read it."""
        self._control = control
        self._let_go = let_go
        self._generator = generator
        self._progress = generator.progress
        self._tracer = tracer
        self._answers = ControlAnswers(control, NAME, tracer, self._figures, self._stop)
        self._queue: deque[Generate] = deque()
        self._current: int | None = None
        self._cancelled = False
        self._stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        while not self._stopping:
            if not self._queue:
                received = self._control.receive(IDLE_WAKE_S)
                # Idle it holds no slot, whatever the service takes out in the meantime.
                self._let_go()
                self._progress.beat()
                if received is not None:
                    self._take(received[1])
                continue
            self._answer(self._queue.popleft())
        self._tracer.stop()
        self._generator.kept.close()

    def _answer(self, request: Generate) -> None:
        self._current, self._cancelled = request.request, False
        for event in self._generator.run(request, self._is_cancelled, self._control.send):
            self._deliver(event)
        self._current = None

    def _is_cancelled(self) -> bool:
        """Take in what has come; whether the request at hand is to end."""
        for _, message in self._control.drain():
            self._take(message)
        return self._cancelled or self._stopping

    def _deliver(self, event: Event) -> None:
        """Send, waiting while the supervisor's queue is full: one that is stopped stops us too, and
        one that is gone ends this process."""
        while not self._control.send(event):
            self._progress.beat()
            time.sleep(DELIVERY_PAUSE_S)

    def _take(self, message: Message) -> None:
        match message:
            case Generate():
                self._enqueue(message)
            case Cancel(request):
                self._cancel(request)
            case _:
                self._answers.take(message)

    def _enqueue(self, request: Generate) -> None:
        if len(self._queue) < QUEUED_REQUESTS:
            self._queue.append(request)
        else:
            error = f"{QUEUED_REQUESTS} requests wait already; try again later"
            self._deliver(_unstarted(request, "error", error, "resource"))

    def _cancel(self, request: int) -> None:
        if request == self._current:
            self._cancelled = True
        for waiting in [waiting for waiting in self._queue if waiting.request == request]:
            self._queue.remove(waiting)
            self._deliver(_unstarted(waiting, "cancelled"))

    def _stop(self) -> None:
        self._stopping = True

    def _figures(self) -> dict[str, float]:
        return {
            **self._generator.counts(),
            counters.STEPS: float(self._generator.steps),
            counters.MALFORMED_MESSAGES: float(self._control.malformed),
        }


def _unstarted(request: Generate, reason: str, error: str = "", kind: FailureKind = "") -> Finished:
    return Finished(request.request, reason, "", error, kind, len(request.prompt), 0, 0, {})


def serve(spec: ComputeSpec) -> None:
    """The process's whole life."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control = Channel.connect(context, spec.control, NAME, CONTROL)
    control.send(Hello(NAME, os.getpid(), 0))
    if spec.threads > 0:
        torch.set_num_threads(spec.threads)
    tracer = Tracer(NAME, spec.trace)
    parts = assemble(spec, context, control, tracer)
    control.send(Ready(NAME, parts.facts))
    ComputeProcess(control, parts.generator, tracer, parts.let_go).run()


if __name__ == "__main__":
    run_child(ComputeSpec, serve)
