"""Recording routes with a real process group."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from protocol.counters import DEMAND_HITS, DEMAND_MISSES
from protocol.identity import checkpoint_identity
from protocol.route_trace import InputsTrace, RouteTrace, inputs_path
from tests.ipc.running_group import MINI, RunningGroup

PROMPT = list(range(20, 50))


def test_a_trace_says_what_the_run_did_and_neither_it_nor_foretelling_changes_its_text(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.routes"
    with RunningGroup(chunk_tokens=8) as group:
        text = group.tokens(PROMPT, 6)
    recording = {"route_trace": path, "route_trace_inputs": True}
    with RunningGroup(chunk_tokens=8, predict_early=True, **recording) as group:
        assert group.tokens(PROMPT, 6) == text
        counted = group.stats()["compute"]
    trace = RouteTrace(path)
    steps = list(trace)
    assert trace.header.identity == checkpoint_identity(MINI)
    assert [(step.start, step.tokens) for step in steps] == [
        *((0, 8), (8, 8), (16, 8), (24, 6)),
        *((30 + n, 1) for n in range(5)),
    ]
    assert not trace.cut_short and InputsTrace(inputs_path(path)).tokens == 35
    # Every pick was looked up once a pass and layer, and was there or was missed.
    hits = misses = 0
    for step in steps:
        for picks, resident in zip(step.picks, step.resident, strict=True):
            seen = dict(zip(picks.flatten().tolist(), resident.flatten().tolist(), strict=True))
            hits += sum(seen.values())
            misses += len(seen) - sum(seen.values())
    # Between the recording and the demand another expert may land.
    assert hits + misses == counted[DEMAND_HITS] + counted[DEMAND_MISSES]
    assert abs(misses - counted[DEMAND_MISSES]) <= 0.1 * misses
    decode = steps[-1]
    for number, predictor in enumerate(trace.header.predictors):
        first = predictor.distance - (predictor.source == "stream")
        said = ~np.isnan(decode.scores[number]).any(-1)
        assert said.tolist() == [layer >= first for layer in range(trace.header.layers)]
        assert (np.diff(decode.scores[number, first:]) <= 0).all()
