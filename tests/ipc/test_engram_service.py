"""The engram process over its real sockets and shared memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from protocol import counters
from protocol.layouts import EngramRing
from protocol.messages import EngramFailed, EngramReady, EngramRequest, Hello, Landed, Ready
from protocol.wire import VERSION
from tests.ipc.engram_process import BLOCK_TOKENS, TIMEOUT_S, EngramProcess


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
def test_rows_in_the_ring_are_the_shards_bytes(direct: bool) -> None:
    rng = np.random.default_rng(5)
    with EngramProcess(direct=direct, wait_ready=False) as engram:
        received = engram.control.receive(TIMEOUT_S)
        assert received == ("engram", Hello("engram", engram.process.pid, 0))
        ready = engram.from_control(Ready)
        assert ("O_DIRECT, kernel AIO" in ready.facts["engram reads"]) == direct
        assert "415 classes" in ready.facts["token map"]
        sequence = rng.integers(3, 500, BLOCK_TOKENS + 20).tolist()
        engram.ask(0, sequence[:BLOCK_TOKENS])
        assert engram.answers(0) == [EngramReady(0, 0), EngramReady(0, 1)]
        engram.check_rows(0, sequence[:BLOCK_TOKENS])
        for ticket, position in enumerate(range(BLOCK_TOKENS, len(sequence)), 1):
            history = sequence[position - 3 : position]
            engram.ask(ticket, [sequence[position]], position, history)
            assert engram.answers(ticket) == [EngramReady(ticket, 0), EngramReady(ticket, 1)]
            engram.check_rows(ticket, [sequence[position]], history)
        assert engram.stop() == 0


def test_a_row_asked_for_twice_is_read_once_and_counted() -> None:
    with EngramProcess() as engram:
        for ticket in range(3):
            engram.ask(ticket, [9] * 40)
            engram.answers(ticket)
        figures = engram.stats()
    asked = 2 * 40 * 6  # layers, tokens, rows a token
    assert figures[counters.ENGRAM_ROWS] == 3 * asked
    assert figures[counters.ENGRAM_CACHE_HITS] == 2 * asked
    assert 0 < figures[counters.ENGRAM_ROWS_READ] <= 2 * 4 * 6
    assert figures[counters.ENGRAM_READ_BYTES] > 0
    assert figures[counters.ENGRAM_READ_SECONDS] > 0


def test_a_request_that_is_asked_again_is_answered_and_read_once() -> None:
    """Compute asks again while it waits, which behind a long request's end reads all of it anew."""
    with EngramProcess(cache_bytes=0) as engram:
        for _ in range(3):
            engram.ask(0, [9, 10, 11])
            assert engram.answers(0) == [EngramReady(0, 0), EngramReady(0, 1)]
        engram.check_rows(0, [9, 10, 11])
        assert engram.stats()[counters.ENGRAM_ROWS] == 2 * 3 * 6  # layers, tokens, rows a token


def test_without_a_cache_the_rows_are_the_same() -> None:
    with EngramProcess(cache_bytes=0) as engram:
        for ticket in range(4):
            engram.ask(ticket, [9, 10, 11])
            engram.answers(ticket)
            engram.check_rows(ticket, [9, 10, 11])
        assert engram.stats()[counters.ENGRAM_CACHE_HITS] == 0


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (EngramRequest(0, 0, [512], []), "512 is outside the vocabulary"),
        (EngramRequest(0, 0, [-1], []), "-1 is outside the vocabulary"),
        (EngramRequest(0, 7, [5], [1, 2]), "2 tokens of history, expected 3"),
        (EngramRequest(0, -4, [5], []), "expected 0"),
        (EngramRequest(0, 0, [], []), "0 tokens, expected 1 to 64"),
        (EngramRequest(0, 0, [5] * 65, []), "65 tokens, expected 1 to 64"),
        (EngramRequest(-2, 0, [5], []), "request -2"),
        (EngramRequest(0, 0, [1 << 62], []), "outside the vocabulary"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_makes_no_sense_fails_alone(
    shared_engram: EngramProcess, request_: EngramRequest, said: str
) -> None:
    shared_engram.requests.send(request_)
    answer = shared_engram.answer()
    assert isinstance(answer, EngramFailed)
    assert answer.ticket == request_.ticket
    assert said in answer.reason and "\n" not in answer.reason
    shared_engram.ask(1, [5, 6])
    shared_engram.answers(1)
    shared_engram.check_rows(1, [5, 6])


@pytest.fixture(scope="module")
def shared_engram() -> Iterator[EngramProcess]:
    with EngramProcess() as engram:
        yield engram


def test_malformed_messages_are_counted_and_survived(shared_engram: EngramProcess) -> None:
    before = shared_engram.stats()[counters.MALFORMED_MESSAGES]
    good = EngramRequest(0, 0, [5], []).encode()
    bad = [
        [b""],
        [bytes((VERSION,))],
        [b"\x63" + good[1:]],
        [good[:-1]],
        [good + b"\xc1"],
        [good[:2] + b"\xdd\xff\xff\xff\xff"],
        [Landed(1, [2]).encode()],
        [good, good],
        [np.random.default_rng(0).bytes(4000)],
    ]
    stranger = shared_engram.context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.IDENTITY, b"stranger")
    stranger.connect(shared_engram.endpoint)
    for frames in bad:
        stranger.send_multipart(frames)
    stranger.send(good)  # on the same socket, so it arrives after all of them
    assert stranger.poll(10_000)
    stranger.close()
    shared_engram.ask(3, [5, 6, 7])
    shared_engram.answers(3)
    shared_engram.check_rows(3, [5, 6, 7])
    assert shared_engram.stats()[counters.MALFORMED_MESSAGES] == before + len(bad)


def test_a_ticket_that_gave_way_is_not_read_to_its_end() -> None:
    """Compute sends a new ticket for a block only when it no longer wants the old one."""
    with EngramProcess(latency=0.3, cache_bytes=0) as engram:
        tokens = list(range(3, 60))
        engram.ask(1, tokens)
        # All four come while its second layer is read, so that none is begun before the last.
        assert engram.answer() == EngramReady(1, 0)
        for ticket in (0, 2, 4, 6):
            engram.ask(ticket, tokens)
        collected = [engram.answer()]
        while collected[-1] != EngramReady(6, 1):
            collected.append(engram.answer())
        gave_way = {a.ticket for a in collected if isinstance(a, EngramFailed)}
        assert gave_way == {0, 2, 4}
        assert not any(EngramReady(ticket, 0) in collected for ticket in gave_way)
        engram.check_rows(6, tokens)


def test_a_trace_names_every_round_of_reads(tmp_path: Path) -> None:
    path = tmp_path / "engram.jsonl"
    with EngramProcess() as engram:
        engram.ask(0, [5, 6, 7])
        engram.answers(0)
        engram.trace_on(path)
        engram.ask(1, [15, 16, 17])
        engram.answers(1)
        engram.ask(2, list(range(20, 28)))
        engram.answers(2)
        engram.trace_off()
    events = [json.loads(line) for line in path.read_text().splitlines() if line]
    spans = [event for event in events if event["name"] == "engram read"]
    # A few tokens' rows of both layers come at once, of many tokens the first layer's first.
    assert [span["args"]["layers"] for span in spans] == [[1, 3], [1], [3]]
    assert all(span["args"]["bytes"] > 0 and span["dur"] > 0 for span in spans)


def test_96_reads_of_a_slow_disk_wait_together() -> None:
    """One after the other they took 28 ms a token; here a read takes 10 ms and 12 are needed."""
    with EngramProcess(latency=0.01, cache_bytes=0) as engram:
        engram.ask(0, [5])
        engram.answers(0)
        before = engram.stats()
        for ticket in range(1, 6):
            engram.ask(ticket, [5 + ticket])
            engram.answers(ticket)
        after = engram.stats()
    seconds = after[counters.ENGRAM_READ_SECONDS] - before[counters.ENGRAM_READ_SECONDS]
    rows = after[counters.ENGRAM_ROWS_READ] - before[counters.ENGRAM_ROWS_READ]
    assert rows >= 5 * 2 * 4
    assert 5 * 0.01 <= seconds < rows * 2 * 0.01 / 2


def test_a_ring_of_another_shape_ends_the_start_with_one_line() -> None:
    ring = EngramRing.create(blocks=2, layers=2, block_tokens=8, rows=6, head_dim=64)
    with EngramProcess(ring=ring, wait_ready=False) as engram:
        _, error = engram.process.communicate(timeout=20)
        assert engram.process.returncode == 1
        assert error.count("\n") == 1 and "(2, 6, 64)" in error and "(2, 6, 32)" in error
