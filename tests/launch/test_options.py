"""Symptoms: a size read as another, an option out of range that is noticed only later."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from launch.options import GenerateOptions, GroupOptions, format_size, parse_cache, parse_size
from protocol.errors import UsageError
from protocol.messages import Generate
from protocol.wire import decode


@pytest.mark.parametrize(
    "text, count",
    [
        ("1048576", 1 << 20),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("500MB", 500_000_000),
        ("64GiB", 64 << 30),
        ("64 gib", 64 << 30),
        ("1.5Gi", 3 << 29),
        ("2T", 2 * 10**12),
        ("0", 0),
        (" 7B ", 7),
    ],
)
def test_a_size_is_what_it_says(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "64 gigs", "i", "5iB", "1,5G", "10%", "9" * 400, "٣", "3²"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_a_cache_is_a_size_or_a_share() -> None:
    assert parse_cache("25%") == (None, 0.25)
    assert parse_cache("2.5 %") == (None, 0.025)
    assert parse_cache("2GiB") == (2 << 30, None)
    with pytest.raises(UsageError):
        parse_cache("%")
    with pytest.raises(UsageError, match="is not a size"):
        parse_cache("9" * 400 + "%")
    for text in ("0.004%", "25%", "1048576"):
        assert str(parse_cache(text)) == text


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (18_800_000, "17.9 MiB"),
        (475 << 30, "475.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_unit(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    "options, said",
    [
        ({"readers": 0}, "--readers is 0, expected at least 1"),
        ({"readers": 10_000}, "--readers is 10000, expected at most 256"),
        ({"predicted_in_flight": -1}, "--prefetch is -1, expected at least 0"),
        ({"threads": 100_000}, "--threads is 100000, expected at most 1024"),
        ({"kept_bytes": 1 << 70}, "--keep is .*, expected at most"),
        ({"chunk_tokens": 10**20}, "--chunk-tokens is 100000000000000000000, expected at most"),
        ({"start_timeout": 0.0}, "--start-timeout is 0.0, expected at least 0.001"),
        ({"start_timeout": math.nan}, "--start-timeout is nan, expected at least 0.001"),
        ({"stall_timeout": math.inf}, "--stall-timeout is inf, expected at most"),
        ({"device": "meta"}, "--device is 'meta', expected auto, cpu, cuda, or cuda:N"),
        ({"device": ""}, "--device is '', expected auto"),
        ({"device": "cuda:-1"}, "--device is 'cuda:-1', expected auto"),
        ({"reader_faults": "x"}, "fault 'x': expected one of delay"),
        ({"engram_faults": "delay:seconds=nan"}, "seconds must be from 0 to 3600"),
        ({"reader_faults": "delay:seconds=1e400"}, "seconds must be from 0 to 3600"),
        ({"silence_timeout": 0.0}, "--silence-timeout is 0.0, expected at least 0.1"),
        ({"disk_bandwidth": -1}, "--disk-bandwidth is -1, expected at least 0"),
        ({"disk_latency": math.nan}, "--disk-latency is nan, expected at least 0"),
        ({"chunk_tokens": 0}, "--chunk-tokens is 0, expected at least 1"),
        ({"pin": "maybe"}, "--pin is 'maybe', expected auto, on or off"),
        ({"route_trace_inputs": True}, "--route-trace-inputs needs --route-trace FILE"),
    ],
)
def test_an_option_out_of_range_is_named_as_it_is_written(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        GroupOptions(Path("DIR"), **options)


@pytest.mark.parametrize(
    ("options", "cores", "looks"),
    [
        ({"device": "cuda"}, 16, True),
        ({"device": "cuda"}, 8, False),
        ({"device": "cuda", "readers": 12}, 16, False),
        ({"device": "cpu"}, 64, False),  # all of them compute
        ({"device": "cpu", "threads": 8}, 16, True),
        ({"device": "cpu", "threads": 9}, 16, False),
        ({"device": "cpu", "busy_poll": 0.01}, 2, True),
        ({"device": "cuda", "busy_poll": 0.0}, 64, False),
    ],
)
def test_processes_wait_without_sleeping_where_cores_are_spare(
    options: dict[str, Any], cores: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert bool(GroupOptions(Path("DIR"), **options).busy_poll_seconds) == looks


def test_a_request_reaches_compute_with_every_value() -> None:
    options = GenerateOptions([5, 6], 7, 0.8, 40, 0.9, 0.05, 11, ("end", "\n"), True, 0.5, -0.5, 3)
    message = options.message(17)
    assert decode(message.encode(), [Generate]) == Generate(
        17, [5, 6], 7, 0.8, 40, 0.9, 0.05, 11, ["end", "\n"], True, 0.5, -0.5, 3
    )
