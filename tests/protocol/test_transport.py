"""Sockets that neither block, nor grow, nor fall to what a peer sends."""

from __future__ import annotations

import asyncio
import select
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol.messages import Cancel, Hello, Landed, StatsRequest, Stop
from protocol.transport import HIGH_WATER_MARK, IPC_PATH_LIMIT, Channel, Endpoints
from protocol.wire import VERSION, Message

PATIENCE_S = 10.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    begin = time.monotonic()
    context.destroy(linger=0)
    assert time.monotonic() - begin < 1, "closing waits for messages that no one takes"


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hr-") as directory:
        yield f"ipc://{directory}/socket"


def _receive(channel: Channel) -> tuple[str, Message]:
    received = channel.receive(PATIENCE_S)
    assert received is not None, "nothing came"
    return received


def test_a_message_comes_with_its_senders_name_and_an_answer_finds_it(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    bound = Channel.bind(context, address, [Hello])
    peers = {
        name: Channel.connect(context, address, name, [Cancel]) for name in ("compute", "engram")
    }
    for number, (name, peer) in enumerate(peers.items()):
        assert peer.send(Hello(name, number, 0))
    for _ in peers:
        name, message = _receive(bound)
        assert isinstance(message, Hello) and message.process == name
        assert bound.send(Cancel(message.pid), to=name)
    for number, peer in enumerate(peers.values()):
        assert _receive(peer) == ("", Cancel(number))


def test_sending_to_no_one_is_counted_and_does_not_wait(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    bound = Channel.bind(context, address, [Hello])
    begin = time.monotonic()
    assert not bound.send(Stop(), to="nobody")
    assert bound.dropped == 1 and time.monotonic() - begin < 1


def test_a_peer_that_takes_nothing_fills_no_memory(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    lonely = Channel.connect(context, address, "compute", [Stop])
    sent = sum(lonely.send(Cancel(number)) for number in range(HIGH_WATER_MARK + 500))
    assert sent == HIGH_WATER_MARK and lonely.dropped == 500


@pytest.mark.parametrize(
    "frames, reason",
    [
        ([b""], "0 bytes"),
        ([b"\x09\x05\x91\x00"], "version 9"),
        ([StatsRequest(1).encode()], "not expected"),
        ([bytes((VERSION, 1)) + b"\xff\xff"], "Hello"),
        ([b"one", b"two"], "3 frames"),
    ],
)
def test_what_is_no_message_is_counted_and_the_next_one_arrives(
    context: zmq.Context[zmq.Socket[bytes]], address: str, frames: list[bytes], reason: str
) -> None:
    bound = Channel.bind(context, address, [Hello])
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.IDENTITY, b"intruder")
    raw.connect(address)
    raw.send_multipart(frames)
    raw.send(Hello("reader-0", 1, 0).encode())
    # The first receive may find only the malformed one.
    received = bound.receive(PATIENCE_S) or bound.receive(PATIENCE_S)
    assert received == ("intruder", Hello("reader-0", 1, 0))
    assert bound.malformed == 1
    assert "from intruder" in bound.last_malformed and reason in bound.last_malformed


def test_a_frame_larger_than_any_message_ends_that_connection_only(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    bound = Channel.bind(context, address, [Hello])
    huge = context.socket(zmq.DEALER)
    ends = huge.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    huge.connect(address)
    huge.send(bytes(17 << 20))
    assert ends.poll(PATIENCE_S * 1000), "the frame was taken"
    honest = Channel.connect(context, address, "compute", [Stop])
    honest.send(Hello("compute", 1, 0))
    assert _receive(bound) == ("compute", Hello("compute", 1, 0))
    assert bound.malformed == 0


def test_a_replacement_takes_over_its_predecessors_name(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    bound = Channel.bind(context, address, [Hello])
    old = Channel.connect(context, address, "reader-0", [Stop, Landed])
    old.send(Hello("reader-0", 1, 0))
    _receive(bound)
    new = Channel.connect(context, address, "reader-0", [Stop, Landed])
    new.send(Hello("reader-0", 2, 1))
    assert _receive(bound) == ("reader-0", Hello("reader-0", 2, 1))
    assert bound.send(Stop(), to="reader-0")
    assert _receive(new) == ("", Stop())


def test_no_message_waits_for_another_to_wake_the_loop(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    """ZeroMQ's descriptor wakes once for many messages, and a send may take the wake-up away."""
    count = 2000

    async def main() -> list[Message]:
        received: list[Message] = []
        done = asyncio.Event()
        bound = Channel.bind(context, address, [Cancel])
        peer = Channel.connect(context, address, "compute", [Cancel])

        def echo(sender: str, message: Message) -> None:
            bound.send(message, to=sender)

        def collect(sender: str, message: Message) -> None:
            received.append(message)
            if len(received) == count:
                done.set()

        loop = asyncio.get_running_loop()
        bound.attach(loop, echo)
        peer.attach(loop, collect)
        async with asyncio.timeout(PATIENCE_S):
            for number in range(count):
                # ZeroMQ's own threads may get no processor for a while, and queues are finite.
                while number - len(received) >= HIGH_WATER_MARK // 2:
                    await asyncio.sleep(0)
                assert peer.send(Cancel(number))
                if number % 7 == 0:
                    await asyncio.sleep(0)
            await done.wait()
        bound.close()
        peer.close()
        return received

    assert asyncio.run(main()) == [Cancel(number) for number in range(count)]


def test_a_message_whose_wake_up_a_send_takes_away_is_handled(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    count = 100  # what can be seen may be of the connection, and not the message

    async def main() -> list[Message]:
        received: list[Message] = []
        came = asyncio.Event()
        bound = Channel.bind(context, address, [Cancel])
        peer = Channel.connect(context, address, "compute", [StatsRequest])

        def collect(_: str, message: Message) -> None:
            received.append(message)
            came.set()

        bound.attach(asyncio.get_running_loop(), collect)
        async with asyncio.timeout(PATIENCE_S):
            for number in range(count):
                came.clear()
                peer.send(Cancel(number))
                # Seen here and not by the loop, which does not run until the next line but one.
                assert select.select([bound._fd], [], [], PATIENCE_S)[0]
                bound.send(StatsRequest(number), to="compute")
                await came.wait()
        bound.close()
        peer.close()
        return received

    assert asyncio.run(main()) == [Cancel(number) for number in range(count)]


def test_what_is_taken_in_before_its_wake_up_is_handled_once_and_the_next_wakes_the_loop(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    async def main() -> list[Message]:
        received: list[Message] = []
        came = asyncio.Event()
        bound = Channel.bind(context, address, [Cancel])
        peer = Channel.connect(context, address, "compute", [StatsRequest])
        poller = zmq.Poller()
        bound.register(poller)

        def collect(_: str, message: Message) -> None:
            received.append(message)
            came.set()

        bound.attach(asyncio.get_running_loop(), collect)
        async with asyncio.timeout(PATIENCE_S):
            for number in range(0, 100, 2):
                peer.send(Cancel(number))
                assert poller.poll(PATIENCE_S * 1000)
                bound.take_in()  # the loop has not run since it was sent
                assert received[-1] == Cancel(number)
                came.clear()
                peer.send(Cancel(number + 1))
                await came.wait()
        bound.close()
        peer.close()
        return received

    assert asyncio.run(main()) == [Cancel(number) for number in range(100)]


def test_endpoints_too_long_for_a_socket_are_refused() -> None:
    fits = Path("/" + "x" * (IPC_PATH_LIMIT - len("/" + "/control")))
    assert Endpoints.under(fits).control == f"ipc://{fits}/control"
    with pytest.raises(ValueError, match=f"longer than {IPC_PATH_LIMIT} bytes"):
        Endpoints.under(Path(f"{fits}x"))


def test_a_channel_closed_before_its_first_wakeup_is_read(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    failures: list[object] = []

    async def start_and_fail() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, found: failures.append(found))
        channel = Channel.bind(context, address, [Hello])
        channel.attach(loop, lambda sender, message: None)
        channel.close()
        await asyncio.sleep(0)

    asyncio.run(start_and_fail())
    assert failures == []
