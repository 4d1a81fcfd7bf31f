"""ZeroMQ sockets that speak `protocol.messages`, and the addresses they meet at.

Promises: LINGER 0 and a high-water mark on every socket, so that no exit hangs and no queue grows
without bound; a send never blocks; a malformed frame is counted and dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from protocol.wire import MalformedMessage, Message, decode

# Messages queued a peer. A layer sends two; a peer a thousand behind is stuck, not slow.
HIGH_WATER_MARK = 1000
# Of a context: one for its sockets' bytes and one that closes them.
CONTEXT_THREADS = 2
# sockaddr_un holds 108 bytes with the final zero.
IPC_PATH_LIMIT = 107


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The group's sockets inside its private runtime directory."""

    control: str
    experts: str
    readers: str
    engram: str

    @classmethod
    def under(cls, directory: Path) -> Endpoints:
        """Addresses in `directory`; raises ValueError where a path is too long for a socket."""
        longest = directory / "control"
        if len(str(longest).encode()) > IPC_PATH_LIMIT:
            raise ValueError(f"{longest} is longer than {IPC_PATH_LIMIT} bytes")
        return cls(
            *(f"ipc://{directory}/{name}" for name in ("control", "experts", "readers", "engram"))
        )


class Channel:
    """One socket: ROUTER where it binds (peers by identity), DEALER where it connects."""

    def __init__(self, socket: zmq.Socket[bytes], accepts: Iterable[type[Message]]) -> None:
        self._socket = socket
        self._accepts = frozenset(accepts)
        self._router = socket.type == zmq.ROUTER
        self._on_wakeup: Callable[[], None] | None = None
        self._fd = int(socket.get(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waking = False
        self.malformed = 0
        self.dropped = 0
        self.last_malformed = ""

    @classmethod
    def bind(
        cls, context: zmq.Context[zmq.Socket[bytes]], address: str, accepts: Iterable[type[Message]]
    ) -> Channel:
        """Listen at `address` for many peers."""
        socket = _socket(context, zmq.ROUTER)
        # A replaced process comes back under its own name before the old connection has closed.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(address)
        return cls(socket, accepts)

    @classmethod
    def connect(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: str,
        accepts: Iterable[type[Message]],
    ) -> Channel:
        """Talk to the one that listens at `address`, under the name `identity`."""
        socket = _socket(context, zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        socket.connect(address)
        return cls(socket, accepts)

    def send(self, message: Message, to: str = "") -> bool:
        """Queue `message` (to the peer `to` of a bound channel). False where the peer is gone or
        its queue is full; the message is then dropped and counted."""
        return self.send_frame(message.encode(), to)

    def send_frame(self, frame: bytes, to: str = "") -> bool:
        """`send` of a message that is encoded already."""
        frames = [to.encode(), frame] if self._router else [frame]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.dropped += 1
            return False
        finally:
            if self._loop is not None and self._on_wakeup is not None and not self._waking:
                # Sending may consume the readiness edge of the descriptor, see `attach`.
                self._waking = True
                self._loop.call_soon(self._on_wakeup)
        return True

    def receive(self, timeout: float) -> tuple[str, Message] | None:
        """The next message and its sender, waiting at most `timeout` seconds; None without one."""
        if timeout > 0 and not self._socket.poll(max(1, round(timeout * 1000))):
            return None
        return next(self.drain(), None)

    def drain(self) -> Iterator[tuple[str, Message]]:
        """Every message already here, in order, without waiting."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            sender = frames[0].decode("utf-8", "replace") if self._router else ""
            if len(frames) != (2 if self._router else 1):
                self._reject(sender, f"{len(frames)} frames")
                continue
            try:
                decoded = decode(frames[-1], self._accepts)
            except MalformedMessage as error:
                self._reject(sender, str(error))
                continue
            yield sender, decoded

    def attach(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[str, Message], None]
    ) -> None:
        """Call `handle(sender, message)` for every message from now on.

        ZeroMQ's descriptor is edge-triggered: it wakes once, and only a full drain arms it again.
        """

        def wakeup() -> None:
            if self._loop is None:
                return  # closed since this call was asked for
            self._waking = False
            for sender, message in self.drain():
                handle(sender, message)

        self._loop, self._on_wakeup = loop, wakeup
        loop.add_reader(self._fd, wakeup)
        self._waking = True
        loop.call_soon(wakeup)

    def take_in(self) -> None:
        """Have every message already here handled, on an attached channel, before its descriptor
        wakes the loop."""
        assert self._on_wakeup is not None
        self._on_wakeup()

    def register(self, poller: zmq.Poller) -> None:
        """Have `poller` report when messages wait here."""
        poller.register(self._socket, zmq.POLLIN)

    def close(self) -> None:
        """Close at once; what is still queued is dropped."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._loop = self._on_wakeup = None
        self._socket.close(linger=0)

    def _reject(self, sender: str, reason: str) -> None:
        self.malformed += 1
        self.last_malformed = f"from {sender or 'the peer'}: {reason}"


def require_threads() -> None:
    """Raise RuntimeError where a context could not start its threads: ZeroMQ ends the process."""
    over = threading.Event()
    tried = [threading.Thread(target=over.wait) for _ in range(CONTEXT_THREADS)]
    try:
        for thread in tried:
            thread.start()
    finally:
        over.set()
    for thread in tried:
        thread.join()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    # Larger than any message; a longer frame closes the connection before it takes the memory.
    socket.setsockopt(zmq.MAXMSGSIZE, 16 << 20)
    return socket
