"""Traces of several processes become one file that a viewer opens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from protocol import trace
from protocol.errors import ResourceError
from protocol.trace import BUFFERED_EVENTS, Tracer, merge


def _joined(tmp_path: Path, *parts: Path) -> list[dict[str, Any]]:
    output = tmp_path / "run.json"
    count = merge(parts, output)
    events: list[dict[str, Any]] = json.loads(output.read_text())["traceEvents"]
    assert len(events) == count
    return events


def test_spans_and_counters_of_two_processes_stand_in_one_trace(tmp_path: Path) -> None:
    parts = []
    for process in ("compute", "reader-0"):
        parts.append(tmp_path / f"{process}.jsonl")
        tracer = Tracer(process, str(parts[-1]))
        with tracer.span("attention", layer=3):
            pass
        tracer.complete("read", 1_000, 5_000, "urgent lane", bytes=4096)
        tracer.counter("queue", depth=2)
        tracer.stop()
    events = _joined(tmp_path, *parts)
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["attention", "read"] * 2
    assert spans[1]["ts"] == 1.0 and spans[1]["dur"] == 4.0 and spans[1]["args"] == {"bytes": 4096}
    titles = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert titles == {"compute", "reader-0", "urgent lane"}
    assert spans[0]["tid"] != spans[1]["tid"], "each lane is a track of its own"
    counters = [event for event in events if event["ph"] == "C"]
    assert [counter["args"] for counter in counters] == [{"depth": 2}] * 2
    assert {event["pid"] for event in events} == {os.getpid()}


def test_a_span_that_raises_is_kept(tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    tracer = Tracer("compute", str(part))
    with pytest.raises(KeyError), tracer.span("experts"):
        raise KeyError
    tracer.stop()
    assert "experts" in [event["name"] for event in _joined(tmp_path, part)]


def test_the_cut_last_line_of_a_killed_process_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part.jsonl"
    monkeypatch.setattr(trace, "BUFFERED_EVENTS", 2)
    tracer = Tracer("reader-0", str(part))
    for _ in range(2):
        tracer.counter("queue", depth=1)
    # Flushed as the buffer filled; the process dies while it writes on, wherever that is.
    whole = part.read_text()
    last = whole.splitlines(keepends=True)[0]
    for length in range(len(last)):
        part.write_text(whole + last[:length])
        assert len(_joined(tmp_path, part)) == 3


def test_no_event_is_no_error(tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    Tracer("compute", str(part)).stop()
    assert [event["ph"] for event in _joined(tmp_path, part)] == ["M"]
    assert _joined(tmp_path) == []


def test_off_it_reads_no_clock_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(trace.time, "monotonic_ns", lambda: looks.append(1) or 0)
    tracer = Tracer("compute")
    with tracer.span("attention", layer=1):
        tracer.counter("queue", depth=1)
        tracer.complete("read", 0, 1)
    tracer.stop()
    assert not looks and not tracer.enabled and not tracer._events


def test_a_second_start_begins_another_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    tracer = Tracer("compute", str(first))
    tracer.complete("one", 0, 1, "lane")
    tracer.start(str(second))
    tracer.complete("two", 0, 1)
    tracer.stop()
    assert "one" in first.read_text() and "two" not in first.read_text()
    assert "two" in second.read_text() and "lane" not in second.read_text()


def test_a_full_disk_ends_tracing_and_not_what_is_traced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tracer = Tracer("compute", "/dev/full")
    for _ in range(BUFFERED_EVENTS + 1):
        tracer.counter("queue", depth=1)
    assert not tracer.enabled
    tracer.stop()
    assert capsys.readouterr().err == "tracing ends: /dev/full: No space left on device\n"


def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    part = tmp_path / "part.jsonl"
    tracer = Tracer("compute", str(part))
    tracer.counter("queue", depth=1)
    tracer.stop()
    for place, why in (("/dev/full", "No space left"), (str(tmp_path), "Is a directory")):
        with pytest.raises(ResourceError, match=f"{place}: cannot be written .{why}"):
            merge([part], Path(place))
