"""Symptoms of the compute process among the real services: a request that cannot be cancelled, a
failure that ends more than its request, a wait without a name, a queue without a bound."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute.device import open_device
from compute.process import QUEUED_REQUESTS
from launch.group import Event
from launch.options import GenerateOptions
from protocol import counters
from protocol.errors import UsageError
from protocol.layouts import Progress
from protocol.messages import Cancel, Finished, PrefillProgress, TokenEvent
from protocol.wire import VERSION
from tests.golden.harness import config
from tests.ipc.running_group import RunningGroup, collect, tokens_of

PROMPT = [0, 5, 9, 17, 33, 4, 250, 77, 41, 301]
LONG = [3 + position * 7 % 490 for position in range(400)]


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


@pytest.fixture(scope="module")
def group() -> Iterator[RunningGroup]:
    with RunningGroup(chunk_tokens=8, kept_bytes=0, verify_slots=True) as running:
        yield running


def test_a_client_that_leaves_a_long_prompt_frees_compute_within_a_chunk(group: RunningGroup):
    events = group.open(LONG, 4)
    while not (isinstance(event := group.run(anext(events)), PrefillProgress) and event.done > 0):
        pass
    group.run(events.aclose())  # type: ignore[attr-defined]
    begin = time.monotonic()
    assert len(group.tokens(PROMPT, 2)) == 2
    # The rest of the long prompt would be 48 more chunks.
    assert group.stats()["compute"][counters.STEPS] < 20
    assert time.monotonic() - begin < 20


def test_cancel_in_the_middle_of_an_answer_is_answered(group: RunningGroup):
    events = group.open(PROMPT, 500)
    seen = [group.run(anext(events))]
    while not isinstance(seen[-1], TokenEvent):
        seen.append(group.run(anext(events)))
    group.group.cancel(seen[-1].request)
    while not isinstance(seen[-1], Finished):
        seen.append(group.run(anext(events)))
    assert finished(seen).reason == "cancelled" and 1 <= finished(seen).tokens < 500
    assert finished(seen).tokens == len(tokens_of(seen))


def test_requests_wait_in_line_up_to_a_bound_and_a_waiting_one_can_be_cancelled(
    group: RunningGroup,
):
    async def crowd() -> list[Finished]:
        streams = [
            # The first lasts until the others have come.
            group.group.generate(GenerateOptions(PROMPT, max_tokens=1 if number else 30))
            for number in range(QUEUED_REQUESTS + 4)
        ]
        first = await anext(streams[0])  # it runs, so that the others wait
        starts = [asyncio.ensure_future(last_of(stream)) for stream in streams]
        await asyncio.sleep(0)
        group.group.cancel(first.request + 2)
        return list(await asyncio.gather(*starts))

    async def last_of(stream: object) -> Finished:
        async for event in stream:  # type: ignore[attr-defined]
            last = event
        assert isinstance(last, Finished)
        return last

    ends = group.run(crowd())
    reasons = [end.reason for end in ends]
    assert reasons[0] != "error" and reasons[2] == "cancelled" and ends[2].tokens == 0
    refused = [end for end in ends if end.reason == "error"]
    # How many are refused depends on whether the cancelled one had left when the last one came.
    assert 2 <= len(refused) <= 3
    assert all(end.error == "8 requests wait already; try again later" for end in refused)
    assert sum(end.tokens > 0 for end in ends) == len(ends) - 1 - len(refused)


def test_bad_requests_are_one_line_each_and_harm_nobody(group: RunningGroup):
    for prompt, changes, message in (
        ([], {}, "the prompt is empty"),
        ([3, 512], {}, "token id 512 is outside the vocabulary of 512"),
        ([3, -4], {}, "token id -4 is outside the vocabulary of 512"),
        ([3] * 32_769, {}, "the prompt has 32769 tokens, more than the context of 32768"),
        ([3], {"temperature": -1.0}, "temperature is -1.0"),
        ([3], {"stop": ("",)}, "a stop string of 0 characters"),
    ):
        end = finished(group.events(prompt, 2, **changes))
        assert (end.reason, end.failure) == ("error", "usage")
        assert message in end.error and "\n" not in end.error
    assert len(group.tokens(PROMPT, 2)) == 2


def test_a_malformed_or_foreign_message_is_counted_and_dropped(group: RunningGroup):
    before = group.stats()["compute"][counters.MALFORMED_MESSAGES]
    socket = group.group._control._socket
    own = bytes((VERSION,))
    for frame in (b"", own, own + b"\x14junk", b"\x07\x14\x90", own + b"\xff\x90"):
        socket.send_multipart([b"compute", frame])
    group.group._control.send(Cancel(99_999), to="compute")
    assert group.stats()["compute"][counters.MALFORMED_MESSAGES] == before + 5
    assert len(group.tokens(PROMPT, 2)) == 2


def test_the_progress_page_says_where_compute_is(group: RunningGroup):
    assert group.group._regions is not None
    words = group.group._regions.progress.words
    step, epoch = int(words[Progress.STEP]), int(words[Progress.EPOCH])
    group.tokens(PROMPT, 5)
    assert words[Progress.STEP] == step + 6  # two chunks and four tokens
    assert words[Progress.LAYER] == config().num_hidden_layers - 1
    assert words[Progress.EPOCH] >= epoch + 6 * config().num_hidden_layers
    beat = int(words[Progress.HEARTBEAT])
    assert abs(time.monotonic_ns() - beat) < 20e9


def test_a_trace_has_a_span_for_every_layer_and_its_parts(group: RunningGroup, tmp_path: Path):
    group.run(group.group.trace_start())
    group.tokens(PROMPT, 3)
    assert group.run(group.group.trace_stop(tmp_path / "trace.json")) > 0
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    mine = [event for event in events if event["pid"] == group.group.pids["compute"]]
    spans = {
        name: {event["args"].get("layer") for event in mine if event["name"] == name}
        for name in ("attention", "routing", "experts", "engram", "pass", "sample")
    }
    layers = set(range(config().num_hidden_layers))
    assert spans["attention"] == spans["routing"] == spans["experts"] == layers
    assert spans["engram"] == set(config().engram_layer_ids)
    assert spans["pass"] and spans["sample"]
    waits = [event for event in mine if event["name"] == "wait for experts"]
    assert waits and all(event["dur"] >= 0 and event["args"]["experts"] > 0 for event in waits)


def test_figures_of_a_request_add_up(group: RunningGroup):
    end = finished(group.events(PROMPT, 6))
    figures = end.figures
    # Top-3 of 8 layers for each of five single tokens, and at least as many in the two chunks.
    assert figures[counters.DEMAND_HITS] + figures[counters.DEMAND_MISSES] >= 7 * 8 * 3
    assert figures[counters.STEPS] == 7
    assert figures[counters.ENGRAM_ROWS] == 15 * 2 * config().engram_rows_per_token
    stalled = figures[counters.STALL_EXPERT_S] + figures[counters.STALL_ENGRAM_S]
    assert 0 < stalled < figures[counters.TTFT_S] + figures[counters.DECODE_S]


def test_stop_strings_and_logprobs_reach_through_the_group(group: RunningGroup):
    events = group.events(PROMPT, 12, logprobs=2)
    text = "".join(event.text for event in events if isinstance(event, TokenEvent | Finished))
    stop = text[3:6]
    again = group.events(PROMPT, 12, stop=(stop,))
    cut = "".join(event.text for event in again if isinstance(event, TokenEvent | Finished))
    assert finished(again).reason == "stop" and cut == text[: text.index(stop)]
    assert all(
        len(event.top_ids) == 2 and event.logprob is not None
        for event in events
        if isinstance(event, TokenEvent)
    )


# --- broken services ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient() -> Iterator[RunningGroup]:
    with RunningGroup(chunk_tokens=8, kept_bytes=0, stall_timeout=2.5) as running:
        yield running


@pytest.mark.parametrize(
    ("silent", "message"),
    [("engram", "engram rows of 8 tokens at position"), ("experts", "layer 0: experts ")],
)
def test_a_service_that_goes_silent_is_a_named_stall_and_the_next_request_works(
    impatient: RunningGroup, silent: str, message: str
):
    expected = impatient.tokens(PROMPT, 4)
    pid = impatient.group.pids[silent]
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        # Another prompt, so that not everything is in memory.
        end = finished(impatient.events(LONG[:40], 4))
        assert time.monotonic() - begin < 20
    finally:
        os.kill(pid, signal.SIGCONT)
    assert end.reason == "error" and "did not come within 2.5 s" in end.error
    assert message in end.error, end.error
    assert impatient.tokens(PROMPT, 4) == expected


@pytest.mark.parametrize("silent", ["engram", "experts"])
def test_a_cancel_waits_for_a_disk_that_has_stopped_answering(silent: str):
    with RunningGroup(chunk_tokens=8, kept_bytes=0, stall_timeout=60.0) as patient:
        expected = patient.tokens(PROMPT, 2)
        pid = patient.group.pids[silent]
        os.kill(pid, signal.SIGSTOP)
        try:
            events = patient.open(LONG[:40], 4)
            progress = patient.run(anext(events))
            assert isinstance(progress, PrefillProgress)
            waiting = patient.run(anext(events))
            assert isinstance(waiting, PrefillProgress) and waiting.done < 8, waiting
            begin = time.monotonic()
            patient.group.cancel(progress.request)
            end = finished(patient.run(collect(events)))
            assert time.monotonic() - begin < 20
        finally:
            os.kill(pid, signal.SIGCONT)
        assert end.reason == "cancelled"
        assert patient.tokens(PROMPT, 2) == expected


def test_reads_that_fail_fail_their_request_and_no_other(group: RunningGroup):
    """The engram's disk fails forty reads, the experts' disk one; then an answer is stopped."""
    with RunningGroup(
        chunk_tokens=8,
        kept_bytes=0,
        reader_faults="eio:after=6:times=1",
        engram_faults="eio:times=40",
    ) as failing:
        ends = [finished(failing.events(PROMPT, 4))]
        while ends[-1].reason == "error":
            assert len(ends) < 60
            ends.append(finished(failing.events(PROMPT, 4)))
        errors = [end.error for end in ends[:-1]]
        assert any(error.startswith("layer 0 expert") for error in errors), errors
        assert any("engram.embed" in error for error in errors), errors
        assert all(".safetensors" in error and "\n" not in error for error in errors), errors
        assert failing.tokens(PROMPT, 4) == group.tokens(PROMPT, 4)

        events = failing.open(PROMPT, 5000)
        while not isinstance(failing.run(anext(events)), TokenEvent):
            pass
        begin = time.monotonic()
        failing.run(failing.group.stop())
        assert time.monotonic() - begin < 2.0


@pytest.mark.parametrize("name", ["cuda:77", "gpu", ""])
def test_an_unusable_device_is_one_line_with_what_to_do(name: str):
    with pytest.raises(UsageError, match=r"^device '.*' cannot be used \(.*\); try --device cpu$"):
        open_device(name)
