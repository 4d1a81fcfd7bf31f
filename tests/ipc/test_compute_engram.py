"""Symptoms: rows of another token, a silent service that hangs a request, a failed read that ends
the engine, a queue that fills up over hundreds of tokens."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from compute.progress import ProgressPage
from compute.ring_engram import RingEngram
from engram_io.local import LocalEngramSource
from protocol import counters
from protocol.errors import HeadraceError, ReadError, StallError
from protocol.layouts import Progress
from protocol.trace import Tracer
from tests.ipc.engram_process import BLOCK_TOKENS, BLOCKS, MINI, EngramProcess


@contextmanager
def ring_engram(
    engram: EngramProcess, stall_timeout: float = 20.0, busy_poll: float = 0.0
) -> Iterator[RingEngram]:
    progress = Progress.create(words_count=Progress.COUNT)
    assert engram.ring is not None
    yield RingEngram(
        engram.requests,
        engram.ring,
        ProgressPage(progress),
        Tracer("compute"),
        stall_timeout=stall_timeout,
        busy_poll=busy_poll,
    )
    progress.close()


def check(source: RingEngram, ticket: int, tokens: list[int], history: list[int]) -> None:
    local = LocalEngramSource.open(MINI)
    other = local.request(len(history), tokens, history)
    for index in range(2):
        codes, scales = source.rows(ticket, index)
        expected_codes, expected_scales = local.rows(other, index)
        assert torch.equal(codes, torch.from_numpy(expected_codes))
        assert torch.equal(scales, torch.from_numpy(expected_scales))


def test_rows_are_those_of_the_tokens_asked_for_ahead():
    with EngramProcess() as engram, ring_engram(engram) as source:
        first = source.request(0, [5, 6, 7], [])
        second = source.request(3, [8], [5, 6, 7])
        check(source, first, [5, 6, 7], [])
        source.done(first)
        check(source, second, [8], [5, 6, 7])
        source.done(second)
        assert source.counts[counters.ENGRAM_ROWS] == 4 * 2 * 6


def test_rows_are_here_once_every_layer_has_them():
    with EngramProcess(latency=0.05, cache_bytes=0) as engram, ring_engram(engram) as source:
        ticket = source.request(0, list(range(3, 60)), [])
        assert not source.here(ticket)
        source.rows(ticket, 0)
        assert not source.here(ticket)
        source.rows(ticket, 1)
        assert source.here(ticket)


def test_a_block_still_in_use_is_not_asked_for_again():
    with EngramProcess() as engram, ring_engram(engram) as source:
        tickets = [source.request(0, [1], []) for _ in range(BLOCKS)]
        with pytest.raises(HeadraceError, match="still in use"):
            source.request(0, [1], [])
        source.done(tickets[0])
        check(source, source.request(0, [9], []), [9], [])


def test_a_ticket_given_up_before_its_rows_came_does_no_harm():
    with EngramProcess() as engram, ring_engram(engram) as source:
        for token in range(3, 40):
            source.done(source.request(0, [token] * BLOCK_TOKENS, []))
        check(source, source.request(0, [9], []), [9], [])


def test_more_tokens_than_a_block_are_refused():
    with EngramProcess() as engram, ring_engram(engram) as source:
        with pytest.raises(HeadraceError, match="a ring block holds 1 to 64"):
            source.request(0, [1] * (BLOCK_TOKENS + 1), [])
        check(source, source.request(0, [9], []), [9], [])


def test_a_silent_service_is_a_named_stall():
    with EngramProcess() as engram, ring_engram(engram, stall_timeout=1.2) as source:
        engram.process.send_signal(signal.SIGSTOP)
        ticket = source.request(7, [1, 2], [3, 4, 5])
        begin = time.monotonic()
        with pytest.raises(StallError, match=r"engram rows of 2 tokens at position 7 \(engram la"):
            source.rows(ticket, 1)
        assert 1.1 < time.monotonic() - begin < 3
        assert source.counts[counters.STALL_ENGRAM_S] >= 1.2
        source.done(ticket)
        engram.process.send_signal(signal.SIGCONT)
        # The answers to the old ticket, sent twice by now, come late and are not mistaken.
        check(source, source.request(0, [9], []), [9], [])


def test_a_failed_read_is_an_error_of_its_ticket_alone():
    with (
        EngramProcess(faults="eio:times=40", cache_bytes=0) as engram,
        ring_engram(engram) as source,
    ):
        failed = 0
        for _ in range(200):
            ticket = source.request(0, [9], [])
            try:
                check(source, ticket, [9], [])
                break
            except ReadError as error:
                failed += 1
                assert "engram.embed" in str(error) and "\n" not in str(error)
            source.done(ticket)
        assert 0 < failed < 200


def test_hundreds_of_tokens_leave_no_message_behind():
    """More answers than a queue holds, most of which no wait takes in."""
    with EngramProcess() as engram, ring_engram(engram) as source:
        for token in range(1200):
            ticket = source.request(0, [token % 400 + 3], [])
            source.rows(ticket, 1)
            source.done(ticket)
        assert len(list(engram.requests.drain())) < 20
        assert engram.stats()[counters.MALFORMED_MESSAGES] == 0
