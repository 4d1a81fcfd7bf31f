"""Engram rows out of the shared ring, asked for from the engram service ahead of their use.

Owns the tickets. Promises: asking never waits; a block of the ring is asked for again only after
`done`; a wait has an end and a name. As with experts the shared memory is the truth and a message
only wakes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compute.bounded_wait import BoundedWait
from compute.interruption import Interruption
from compute.progress import ProgressPage
from protocol import counters
from protocol.errors import HeadraceError, ReadError, StallError
from protocol.layouts import EngramRing, full_fence
from protocol.messages import EngramFailed, EngramReady, EngramRequest
from protocol.trace import Tracer
from protocol.transport import Channel

ACCEPTS = (EngramReady, EngramFailed)


class RingEngram:
    """The process group's EngramSource; see `compute.sources` for the promises to its caller."""

    def __init__(
        self,
        channel: Channel,
        ring: EngramRing,
        progress: ProgressPage,
        tracer: Tracer,
        *,
        stall_timeout: float,
        busy_poll: float = 0.0,
        interruption: Interruption | None = None,
    ) -> None:
        """`stall_timeout` seconds without rows end a wait with StallError; for its first
        `busy_poll` seconds a wait does not sleep. `interruption` is asked in every wait."""
        self._channel = channel
        self._ring = ring
        self._progress = progress
        self._tracer = tracer
        self._stall_timeout = stall_timeout
        self._busy_poll = busy_poll
        self._interruption = interruption or Interruption()
        self._codes = torch.from_numpy(ring.codes)
        self._scales = torch.from_numpy(ring.scales)
        self._next_ticket = 0
        self._outstanding: dict[int, EngramRequest] = {}
        self._failures: dict[int, str] = {}
        self.counts = {counters.ENGRAM_ROWS: 0.0, counters.STALL_ENGRAM_S: 0.0}

    @property
    def block_tokens(self) -> int:
        """The most tokens one request may have."""
        return self._ring.block_tokens

    def request(self, start: int, tokens: Sequence[int], history: Sequence[int]) -> int:
        ticket = self._next_ticket
        if not 0 < len(tokens) <= self._ring.block_tokens:
            raise HeadraceError(
                f"engram rows of {len(tokens)} tokens asked for at once, "
                f"a ring block holds 1 to {self._ring.block_tokens}"
            )
        if ticket - self._ring.blocks in self._outstanding:
            raise HeadraceError(
                f"engram ticket {ticket} needs the ring block of ticket "
                f"{ticket - self._ring.blocks}, which is still in use"
            )
        # What earlier tickets left unread, so that the queue never fills.
        self._hear(0)
        request = EngramRequest(ticket, start, list(tokens), list(history))
        self._next_ticket += 1
        self._outstanding[ticket] = request
        self.counts[counters.ENGRAM_ROWS] += len(tokens) * self._ring.layers * self._ring.rows
        # One that finds the queue full is sent again by the wait for its rows.
        self._channel.send(request)
        return ticket

    def here(self, ticket: int) -> bool:
        return all(self._here(ticket, index) for index in range(self._ring.layers))

    def rows(self, ticket: int, engram_layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        request = self._outstanding[ticket]
        block = ticket % self._ring.blocks
        if not self._here(ticket, engram_layer_index):
            self._wait(request, engram_layer_index)
        # The rows are read after the word that says they are complete.
        full_fence()
        count = len(request.tokens)
        return (
            self._codes[block, engram_layer_index, :count],
            self._scales[block, engram_layer_index, :count],
        )

    def done(self, ticket: int) -> None:
        del self._outstanding[ticket]
        self._failures.pop(ticket, None)

    def _here(self, ticket: int, index: int) -> bool:
        return int(self._ring.ready[ticket % self._ring.blocks, index]) == ticket + 1

    def _wait(self, request: EngramRequest, index: int) -> None:
        waiting = BoundedWait(self._stall_timeout, self._busy_poll)
        try:
            with self._tracer.span("wait for engram", tokens=len(request.tokens), index=index):
                self._await(request, index, waiting)
        finally:
            self.counts[counters.STALL_ENGRAM_S] += waiting.seconds

    def _await(self, request: EngramRequest, index: int, waiting: BoundedWait) -> None:
        while True:
            self._hear(waiting.nap())
            if self._here(request.ticket, index):
                return
            if request.ticket in self._failures:
                raise ReadError(self._failures[request.ticket])
            self._progress.beat()
            self._interruption.check()
            if waiting.exhausted:
                raise StallError(
                    f"engram rows of {len(request.tokens)} tokens at position {request.start} "
                    f"(engram layer number {index}) did not come within "
                    f"{waiting.seconds:.1f} s; is the disk still answering? "
                    "A slow one needs a longer stall timeout"
                )
            if waiting.time_to_repeat():
                self._channel.send(request)

    def _hear(self, seconds: float) -> None:
        """Take in messages, waiting for the first at most `seconds`."""
        first = self._channel.receive(seconds)
        if first is None:
            return
        for _, message in (first, *self._channel.drain()):
            if isinstance(message, EngramFailed) and message.ticket in self._outstanding:
                self._failures[message.ticket] = message.reason
