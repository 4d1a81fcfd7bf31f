"""Route traces: what was written is read, what is damaged is refused, what is cut short is used."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import HeadraceError, ResourceError, UsageError
from protocol.route_trace import (
    FITTED,
    GATE,
    MOE,
    STREAM,
    InputsTrace,
    InputsWriter,
    Predictor,
    RouteTrace,
    RouteTraceWriter,
    Step,
    TraceHeader,
)

PREDICTORS = (Predictor(GATE, MOE, 1, 1 / 64), Predictor(FITTED, STREAM, 2, 1 / 16))
HEADER = TraceHeader("ab" * 16, 3, 300, 4, 8, 1000, 20, 8, PREDICTORS)


def a_step(number: int, tokens: int = 1, header: TraceHeader = HEADER) -> Step:
    random = np.random.default_rng(number)
    picked = (header.layers, tokens, header.top_k)
    named = (len(header.predictors), header.layers, header.named(tokens))
    scores = random.integers(-127, 127, named) / 64
    scores[0, 0] = np.nan
    return Step(
        number,
        5 * number,
        random.integers(0, header.experts, picked),
        random.random(picked).astype(np.float16).astype(np.float32),
        random.random(picked) < 0.5,
        random.integers(0, header.experts, named),
        scores.astype(np.float32),
        (random.integers(0, 10**6, (header.layers, 3)) / 1e6).astype(np.float32),
    )


def written(path: Path, steps: list[Step], header: TraceHeader = HEADER) -> Path:
    with RouteTraceWriter(path, header) as writer:
        for step in steps:
            writer.write(step)
    return path


def same(found: Step, step: Step) -> bool:
    exact = ("picks", "weights", "resident", "predicted")
    return (
        (found.step, found.start, found.tokens) == (step.step, step.start, step.tokens)
        and all(np.array_equal(getattr(found, n), getattr(step, n)) for n in exact)
        and np.allclose(found.seconds, step.seconds, atol=1e-6)
        # Kept in units of 1/64 and 1/16.
        and np.allclose(found.scores[0], step.scores[0], equal_nan=True)
        and np.allclose(found.scores[1], step.scores[1], atol=1 / 32)
    )


@pytest.mark.parametrize("experts", [32, 300])
def test_steps_come_back_as_they_went_in(tmp_path: Path, experts: int) -> None:
    header = replace(HEADER, experts=experts)
    steps = [a_step(0, 1, header), a_step(1, 7, header), a_step(2, 60, header)]
    trace = RouteTrace(written(tmp_path / "t", steps, header))
    assert trace.header == header
    for _ in range(2):
        found = list(trace)
        assert len(found) == 3 and all(same(*pair) for pair in zip(found, steps, strict=True))
    assert not trace.cut_short
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600


def test_a_file_cut_anywhere_is_read_up_to_its_last_whole_step(tmp_path: Path) -> None:
    ends = []
    for count in range(4):
        path = written(tmp_path / "t", [a_step(n) for n in range(count)])
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(ends[0], len(whole)):
        path.write_bytes(whole[:size])
        trace = RouteTrace(path)
        assert len(list(trace)) == sum(end <= size for end in ends[1:])
        assert trace.cut_short == (size not in ends)


def test_a_damaged_file_is_refused_in_one_line_and_never_read_as_something_else(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "t", [a_step(n) for n in range(3)])
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 3):
        for change in (0xFF, 0x01):
            damaged = bytearray(whole)
            damaged[at] ^= change
            path.write_bytes(damaged)
            try:
                trace = RouteTrace(path)
                found = list(trace)
            except HeadraceError as error:
                refused += 1
                assert str(error).startswith(str(path)) and "\n" not in str(error)
            else:
                # A changed length field can look like a cut; a changed figure in the header can be
                # sound. What is read are whole steps either way.
                assert trace.cut_short or trace.header != HEADER
                assert trace.header != HEADER or all(same(s, a_step(s.step)) for s in found)
    assert refused > len(whole) / 3 / 2


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is no route trace"),
        (b"PK\x03\x04 something else entirely", "is no route trace"),
        (b"headrace\x09\0\0\0\x02\0\0\0{}", "version 9"),
        (b"headrace\x01\0\0\0\xff\xff\xff\x7f{}", "cut short"),
        (b"headrace\x01\0\0\0\x02\0\0\0[]", "without the fields"),
        (b"headrace\x01\0\0\0\x02\0\0\0{}", "without the fields"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=line):
        RouteTrace(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t")
    with pytest.raises(UsageError, match="not a file"):
        RouteTrace(tmp_path / "t")


def test_activations_come_back_by_layer_without_the_steps_that_lack_one(tmp_path: Path) -> None:
    path = tmp_path / "t.inputs"
    random = np.random.default_rng(1)
    kept: dict[int, list[np.ndarray]] = {layer: [] for layer in range(HEADER.layers)}
    with InputsWriter(path, HEADER) as writer:
        for step, tokens, layers in ((0, 2, 3), (1, 4, 2), (2, 3, 3)):
            for layer in range(layers):
                both = random.random((2, tokens, HEADER.hidden)).astype(np.float16)
                writer.write(step, layer, *both)
                if layers == HEADER.layers:
                    kept[layer].append(both)
    trace = InputsTrace(path)
    assert trace.tokens == 5
    for layer, parts in kept.items():
        assert np.array_equal(np.stack(trace.layer(layer)), np.concatenate(parts, 1))
    with pytest.raises(UsageError, match="holds inputs, expected routes"):
        RouteTrace(path)


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be written"):
        RouteTraceWriter(tmp_path / "missing" / "t", HEADER)


def test_reading_a_trace_needs_no_torch() -> None:
    code = "import sys, protocol.route_trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
