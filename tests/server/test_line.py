"""Many clients, clients that leave, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from openai import RateLimitError

from launch.server import connection, http
from launch.server.answers import Answer, PlainReader
from launch.server.waiting_line import LineFull, WaitingLine
from tests.chat_format.speech import TOKEN_BYTES
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, chat_body, in_loop, serving


async def _open_stream(served: Served, body: dict[str, Any]) -> Any:
    """A raw connection that has sent `body` and reads only when told to."""
    reader, writer = await asyncio.open_connection(*served.host_port)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


@in_loop
async def test_50_clients_at_once_against_a_queue_of_8() -> None:
    engine = FakeEngine("fine")
    engine.hold_from = 0
    async with serving(engine, queue=8) as served:
        calls = [asyncio.create_task(served.chat(f"number {i}")) for i in range(50)]
        refused: list[RateLimitError] = []
        while len(refused) < 41:
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                calls.remove(task)
                error = task.exception()
                assert isinstance(error, RateLimitError), task
                refused.append(error)
        assert len(calls) == 9
        engine.hold_from = None
        engine.gate.release()
        for answer in await asyncio.gather(*calls):
            assert answer.choices[0].message.content == "fine"
        assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
        assert "8 requests wait already" in str(refused[0])
        assert engine.most_active == 1 and len(engine.requests) == 9
        assert (await served.chat()).choices[0].message.content == "fine"
        stats = (await served.http.get("/stats")).json()
        assert stats["totals"]["requests"] == {"refused": 41, "stop": 10}
        assert stats["queue"] == {"running": 0, "waiting": 0, "capacity": 8}


@in_loop
async def test_a_client_that_leaves_in_the_middle_of_a_stream_stops_the_engine() -> None:
    engine = FakeEngine("x" * 100)
    engine.hold_from = 5
    async with serving(engine) as served:
        stream = await served.chat(stream=True)
        await engine.reached.wait()
        await stream.close()
        # No further token is let through: the end comes although the engine has nothing to say.
        await asyncio.wait_for(engine.ended.wait(), 5)
        assert (engine.cancelled, engine.made, engine.active) == (1, 5, 0)
        engine.hold_from = None
        assert (await served.chat()).choices[0].message.content == "x" * 100


@in_loop
async def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_stops_the_engine() -> None:
    engine = FakeEngine("x" * 100)
    engine.hold_from = 5
    async with serving(engine) as served:
        call = asyncio.create_task(served.chat())
        await engine.reached.wait()
        call.cancel()
        await asyncio.wait_for(engine.ended.wait(), 5)
        assert (engine.cancelled, engine.made) == (1, 5)


@in_loop
async def test_clients_that_leave_the_line_make_room() -> None:
    engine = FakeEngine("ok")
    engine.hold_from = 0
    async with serving(engine, queue=2) as served:
        first = asyncio.create_task(served.chat())
        await engine.reached.wait()
        waiting = [await _open_stream(served, chat_body(stream=s)) for s in (True, False)]
        while (await served.http.get("/stats")).json()["queue"]["waiting"] < 2:
            await asyncio.sleep(0.01)
        for _, writer in waiting:
            writer.close()
        while (await served.http.get("/stats")).json()["queue"]["waiting"] > 0:
            await asyncio.sleep(0.01)
        engine.hold_from = None
        engine.gate.release()
        assert (await first).choices[0].message.content == "ok"
        assert len(engine.requests) == 1


@in_loop
async def test_a_slow_reader_does_not_hold_up_the_next_request() -> None:
    engine = FakeEngine("y" * 4000)
    async with serving(engine) as served:
        reader, writer = await _open_stream(served, chat_body(stream=True))
        # It has read nothing, yet its answer is finished and the next client is served.
        assert (await served.chat(max_tokens=3)).choices[0].message.content == "yyy"
        assert engine.most_active == 1
        received = b""
        while b"[DONE]" not in received:
            received += await reader.read(1 << 16)
        content = "".join(
            json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            for line in received.decode().splitlines()
            if line.startswith("data: {")
        )
        assert content == "y" * 4000
        writer.close()


@in_loop
async def test_what_waits_for_a_slow_reader_is_merged() -> None:
    engine = FakeEngine("z" * 3000)
    options = engine.requests  # none yet
    assert not options
    from launch.options import GenerateOptions
    from launch.server.activity import Activity

    answer = Answer(GenerateOptions([0], max_tokens=4000), [], PlainReader(TOKEN_BYTES))
    line = WaitingLine(1)
    await answer.run(engine, line, line.join(), Activity())
    batch = await answer.take(1)
    assert batch is not None and len(batch.deltas) == 1
    assert batch.deltas[0].text == "z" * 3000  # type: ignore[union-attr]
    assert await answer.take(1) is None


@in_loop
async def test_a_reader_that_never_reads_is_let_go(monkeypatch: Any) -> None:
    monkeypatch.setattr(connection, "SEND_SECONDS", 0.2)
    # Far more than the kernel and the server buffer for one connection.
    engine = FakeEngine(lambda options: "w" * 60 if options.max_tokens < 99 else "w" * 9000)
    engine.options = engine.options.__class__(engine.options.checkpoint, max_context=1 << 15)
    async with serving(engine) as served:
        body = chat_body(stream=True, logprobs=True, top_logprobs=2)
        _, writer = await _open_stream(served, body)
        sock = writer.get_extra_info("socket")
        assert sock is not None
        writer.transport.pause_reading()
        await asyncio.wait_for(engine.ended.wait(), 30)
        while True:
            totals = (await served.http.get("/stats")).json()["totals"]["requests"]
            if totals:
                break
            await asyncio.sleep(0.02)
        assert (await served.chat(max_tokens=5)).choices[0].message.content == "wwwww"
        writer.close()


@in_loop
async def test_a_request_head_that_never_ends_keeps_its_place(monkeypatch: Any) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.2)
    engine = FakeEngine("x" * 5)
    engine.hold_from = 3
    async with serving(engine, max_connections=4) as served:
        answered, answering = await _open_stream(served, chat_body(stream=True))
        await engine.reached.wait()
        idle = [await asyncio.open_connection(*served.host_port) for _ in range(2)]
        idle[0][1].write(b"GET /health HTTP/1.1\r\nHo")
        for reader, writer in idle:
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        assert (await served.http.get("/health")).status_code == 200
        # A request whose head has come is given the time that its answer takes.
        engine.gate.release()
        engine.gate.release()
        engine.gate.release()
        assert b"[DONE]" in await answered.readuntil(b"[DONE]")
        answering.close()


@in_loop
async def test_connections_without_a_request_are_not_counted() -> None:
    async with serving(FakeEngine("x"), max_connections=2) as served:
        first = await asyncio.open_connection(*served.host_port)
        # As many as are allowed, this one among them.
        assert (await served.http.get("/health")).status_code == 200
        idle = [await asyncio.open_connection(*served.host_port) for _ in range(http.TOLD)]
        assert (await served.http.get("/health")).status_code == 503
        over = [await asyncio.open_connection(*served.host_port) for _ in range(8)]
        # The first has the place of the connection that 503 closed.
        for reader, _ in over[1:]:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
        for _, writer in (first, *idle, *over):
            writer.close()


@in_loop
async def test_a_server_that_stops_tells_its_clients_and_does_not_wait_for_them() -> None:
    engine = FakeEngine("x" * 10)
    engine.hold_from = 3
    async with serving(engine) as served:
        reader, writer = await _open_stream(served, chat_body(stream=True))
        await engine.reached.wait()
        waiting, other = await _open_stream(served, chat_body())
        while (await served.http.get("/stats")).json()["queue"]["waiting"] < 1:
            await asyncio.sleep(0.01)
        begin = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - begin < 1.0
    assert b"the server is stopping" in await reader.read(1 << 16)
    assert b" 503 " in await waiting.readline()
    assert engine.active == 0
    for open_writer in (writer, other):
        open_writer.close()


@in_loop
async def test_turns_come_in_the_order_of_arrival() -> None:
    line = WaitingLine(3)
    first, second, third, fourth = (line.join() for _ in range(4))
    assert first.came and not second.came
    assert [line.before(turn) for turn in (first, second, third, fourth)] == [0, 1, 2, 3]
    try:
        line.join()
    except LineFull as full:
        assert full.retry_after >= 1
    else:
        raise AssertionError("a fifth was let in")
    line.leave(third)
    line.leave(first)
    line.leave(first)
    assert second.came and not fourth.came
    line.leave(second)
    await fourth.wait()
    line.leave(fourth)
    assert (line.running, line.waiting) == (0, 0)
