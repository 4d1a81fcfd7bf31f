"""From recorded activations to the file of fitted gates, a layer at a time.

Owns the split: the last fifth of the recorded tokens chooses the penalty and calibrates; nothing is
fitted on it. Traces given for measuring are used for nothing else.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save_file

from compute.predictor import FITTED_FORMAT, FittedGates, Key, predict
from compute.weights import GateWeights
from launch.fit.regression import Quality, calibrate, fit_changes, margins, quality
from protocol.errors import ResourceError, UsageError
from protocol.route_trace import MOE, SOURCES, InputsTrace, inputs_path

KEPT_PART = 5
DISTANCES = (1, 2, 3)
# Fewer say nothing about a layer's experts.
LEAST_TOKENS = 256
TIMED = 300


@dataclass(frozen=True, slots=True)
class Result:
    """A fitted gate and how it does, beside the layer's own gate on the same input."""

    key: Key
    tensors: dict[str, torch.Tensor]
    own: Quality
    fitted: Quality


def open_inputs(traces: Sequence[Path], identity: str) -> list[InputsTrace]:
    """The activations beside `traces`. Raises UsageError for what is not this checkpoint's."""
    opened = [InputsTrace(inputs_path(trace)) for trace in traces]
    for inputs in opened:
        if inputs.header.identity != identity:
            raise UsageError(
                f"{inputs.path}: was recorded with another checkpoint; record it again"
            )
    return opened


def learn(
    gates: Sequence[GateWeights],
    top_k: int,
    fitting: Sequence[InputsTrace],
    measuring: Sequence[InputsTrace],
    *,
    rank: int,
    device: torch.device,
    on_result: Callable[[Result], None],
) -> list[Result]:
    """Fit every source, distance and layer. Raises UsageError for too few tokens.

    Without `measuring` the figures are of the part that chose the penalty.
    """
    if (tokens := sum(inputs.tokens for inputs in fitting)) < LEAST_TOKENS:
        raise UsageError(
            f"{tokens} tokens with activations, expected {LEAST_TOKENS} or more; record more with "
            "--route-trace-inputs"
        )
    results = []
    for layer, gate in enumerate(gates):
        wanted = _moe_inputs(fitting, layer, device)
        tested = _moe_inputs(measuring, layer, device)
        for source in SOURCES:
            for distance in DISTANCES:
                seen = layer - distance + (source != MOE)
                if seen < 0:
                    continue
                x = _inputs(fitting, seen, source, device)
                test = _inputs(measuring, seen, source, device)
                result = _learn_one(
                    (source, distance, layer), gate, top_k, (x, wanted), (test, tested), rank
                )
                results.append(result)
                on_result(result)
    return results


def save(path: Path, results: Sequence[Result], identity: str, about: dict[str, object]) -> None:
    """Write the file at once and whole. Raises ResourceError."""
    tensors = {name: t.cpu() for result in results for name, t in result.tensors.items()}
    metadata = {"format": FITTED_FORMAT, "identity": identity, "about": json.dumps(about)}
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)


def means(results: Sequence[Result]) -> list[dict[str, object]]:
    """Means over layers by source and distance, for a table or JSON."""
    rows: list[dict[str, object]] = []
    for source in SOURCES:
        for distance in DISTANCES:
            these = [r for r in results if r.key[:2] == (source, distance)]
            if these:
                rows.append(
                    {
                        "source": source,
                        "distance": distance,
                        "own": _mean([r.own for r in these]),
                        "fitted": _mean([r.fitted for r in these]),
                    }
                )
    return rows


def cost_us(gate: GateWeights, top_k: int) -> float:
    """Microseconds of a prediction for one token; a fitted gate has the form of a layer's own."""
    x = torch.zeros(1, gate.weight.shape[1], dtype=torch.bfloat16, device=gate.weight.device)
    times = []
    for _ in range(TIMED):
        begin = time.perf_counter()
        # Reading it back waits for the device, as the engine has to.
        torch.cat(predict(x, gate, top_k, 2 * top_k)).tolist()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[TIMED // 10 :]) * 1e6


def _learn_one(
    key: Key,
    gate: GateWeights,
    top_k: int,
    fitting: tuple[torch.Tensor, torch.Tensor],
    measuring: tuple[torch.Tensor, torch.Tensor],
    rank: int,
) -> Result:
    x, wanted = fitting
    logits = wanted @ gate.weight.float().T
    picks = _picks(logits, gate, top_k)
    kept = len(x) - len(x) // KEPT_PART
    changes = fit_changes(x[:kept], logits[:kept], gate, min(rank, len(gate.bias)))
    scored = [margins(x[kept:], change.applied(gate), top_k) for change in changes]
    recalls = [quality(s, picks[kept:], 1.0, 0.0).recall_k for s in scored]
    best = max(range(len(changes)), key=recalls.__getitem__)
    chosen, of_kept = changes[best], picks[kept:]
    fitted_calibration = _calibrated(scored[best], of_kept)
    own_calibration = _calibrated(margins(x[kept:], gate, top_k), of_kept)
    if len(measuring[0]):
        x, wanted, kept = *measuring, 0
        picks = _picks(wanted @ gate.weight.float().T, gate, top_k)
    test, truth = x[kept:], picks[kept:]
    return Result(
        key,
        FittedGates.tensors(key, chosen.up, chosen.down, *fitted_calibration),
        quality(margins(test, gate, top_k), truth, *own_calibration),
        quality(margins(test, chosen.applied(gate), top_k), truth, *fitted_calibration),
    )


def _calibrated(scores: torch.Tensor, picks: torch.Tensor) -> tuple[float, float]:
    """Over the experts that would be named: twice top-k."""
    picked = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, picks, True)
    named = scores.topk(min(2 * picks.shape[1], scores.shape[1]), -1).indices
    return calibrate(scores.gather(1, named), picked.gather(1, named))


def _picks(logits: torch.Tensor, gate: GateWeights, top_k: int) -> torch.Tensor:
    biased = torch.nn.functional.softplus(logits).sqrt() + gate.bias
    return biased.topk(top_k, -1).indices


def _inputs(
    traces: Sequence[InputsTrace], layer: int, source: str, device: torch.device
) -> torch.Tensor:
    parts = [torch.from_numpy(trace.layer(layer)[source == MOE]) for trace in traces]
    return torch.cat([torch.empty(0), *parts]).to(device).float() if parts else torch.empty(0)


def _moe_inputs(traces: Sequence[InputsTrace], layer: int, device: torch.device) -> torch.Tensor:
    return _inputs(traces, layer, MOE, device)


def _mean(qualities: Sequence[Quality]) -> dict[str, float]:
    """NaN, which stands where a layer named none, is left out."""
    names = [field.name for field in fields(Quality)]
    each = {name: [getattr(quality, name) for quality in qualities] for name in names}
    counted = {name: [v for v in values if not math.isnan(v)] for name, values in each.items()}
    return {name: sum(v) / len(v) if v else math.nan for name, v in counted.items()}
