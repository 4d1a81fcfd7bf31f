"""Early copies: messages that stand in shared memory before ZeroMQ has brought them.

ZeroMQ hands a message through a thread of its own on either side, each of which has to wake.
Whoever looks for messages without sleeping looks here as well, and so has a demand or an order
sooner. Every message is sent as ever, too: it wakes whoever sleeps, and nothing is lost where a
cell was overwritten unseen. Promises: a receiver takes a message once, whichever way it comes
first; it sees none half written, and none that was meant for the one whose place it has taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from protocol.layouts import CELL_BYTES, CELLS, Cells, full_fence
from protocol.wire import MalformedMessage, Message, decode

_SEQUENCE, _INCARNATION, _LENGTH = range(3)
_HEAD_WORDS = 3
M = TypeVar("M", bound=Message)


class _Views:
    """The same memory as `cells`, flat: an array's indexing takes several times as long."""

    def __init__(self, cells: Cells) -> None:
        self.puts = memoryview(cells.puts.data).cast("B").cast("q")
        self.heads = memoryview(cells.heads.data).cast("B").cast("q")
        self.frames = memoryview(cells.frames.data).cast("B")


class EarlySender:
    """The only writer of `cells`."""

    def __init__(self, cells: Cells) -> None:
        self._cells = _Views(cells)
        self._put = self._cells.puts[0]

    def put(self, frame: bytes, incarnation: int = 0) -> None:
        """Show an encoded message, about to be sent, to this incarnation of its receiver. One that
        is too long for a cell is left to ZeroMQ."""
        length = len(frame)
        if length > CELL_BYTES:
            return
        cells, cell = self._cells, self._put % CELLS
        head, at = cell * _HEAD_WORDS, cell * CELL_BYTES
        cells.heads[head + _SEQUENCE] += 1
        full_fence()
        cells.heads[head + _INCARNATION] = incarnation
        cells.heads[head + _LENGTH] = length
        cells.frames[at : at + length] = frame
        full_fence()
        cells.heads[head + _SEQUENCE] += 1
        self._put += 1
        cells.puts[0] = self._put


class EarlyReceiver(Generic[M]):
    """Takes messages of one type out of `cells`, and knows them again when ZeroMQ brings them.

    `malformed` counts what was found there and is no message.
    """

    def __init__(
        self, cells: Cells, accepts: type[M], number: Callable[[M], int], incarnation: int = 0
    ) -> None:
        """`number` of a message: it grows from each to the next, whatever comes between."""
        self._cells = _Views(cells)
        self._accepts = accepts
        self._number = number
        self._incarnation = incarnation
        self._looked_at = 0  # what was put here, all up to this one
        self._last = -1
        self._not_sent_yet: set[int] = set()
        self.malformed = 0

    def look(self) -> list[M]:
        """The messages that are new, in order."""
        puts = self._cells.puts[0]
        found: list[M] = []
        for put in range(max(self._looked_at, puts - CELLS), puts):
            message = self._read(put % CELLS)
            # One older than another that has been taken comes by ZeroMQ, if it has not yet.
            if message is not None and (number := self._number(message)) > self._last:
                self._last = number
                self._not_sent_yet.add(number)
                found.append(message)
        self._looked_at = puts
        return found

    def has_had(self, message: M) -> bool:
        """Whether `message`, which ZeroMQ has brought, was taken here before: true once for each,
        so that one which is sent again is heard again."""
        number = self._number(message)
        if number in self._not_sent_yet:
            self._not_sent_yet.discard(number)
            return True
        self._last = max(self._last, number)
        return False

    def _read(self, cell: int) -> M | None:
        """The message of a cell; None where it is for another or no message, or is overwritten."""
        heads, head, at = self._cells.heads, cell * _HEAD_WORDS, cell * CELL_BYTES
        sequence = heads[head + _SEQUENCE]
        full_fence()
        incarnation, length = heads[head + _INCARNATION], heads[head + _LENGTH]
        frame = bytes(self._cells.frames[at : at + min(max(0, length), CELL_BYTES)])
        full_fence()
        if sequence % 2 or heads[head + _SEQUENCE] != sequence or incarnation != self._incarnation:
            return None
        try:
            message = decode(frame, (self._accepts,))
        except MalformedMessage:
            self.malformed += 1
            return None
        assert isinstance(message, self._accepts)
        return message
