"""From recorded activations to the file of fitted gates, a layer at a time.

Owns two choices. One block of tokens in five chooses the penalty and calibrates, and nothing is
fitted on it; blocks, because one text's end would stand for all texts. And probabilities are
calibrated on rare experts only: those that their token's layer has not picked for a while. Only
what is absent from the cache is ever read ahead, and what is absent is what was not picked lately.
Among all experts a score says more, because it also tells the ones in steady use from the others.
Traces given for measuring are used for nothing else.
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
BLOCK_TOKENS = 1024
# An expert is rare for a token if none of so many tokens before it picked it.
RARE_AFTER = 30
# Where fewer rare experts are picked, as in a model without locality, calibrating is over all.
LEAST_RARE_PICKS = 50
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


@dataclass(frozen=True, slots=True)
class _Truth:
    """Of a layer, for T tokens: its gate's logits fp32 [T, E], its picks int64 [T, k], and bool
    [T, E] whether an expert is rare."""

    logits: torch.Tensor
    picks: torch.Tensor
    rare: torch.Tensor

    def of(self, tokens: torch.Tensor) -> _Truth:
        """That of a bool [T] of the tokens."""
        return _Truth(self.logits[tokens], self.picks[tokens], self.rare[tokens])


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
        truth = _truth(fitting, layer, gate, top_k, device)
        tested = _truth(measuring, layer, gate, top_k, device)
        for source in SOURCES:
            for distance in DISTANCES:
                seen = layer - distance + (source != MOE)
                if seen < 0:
                    continue
                x = _inputs(fitting, seen, source, device)
                test = _inputs(measuring, seen, source, device)
                result = _learn_one(
                    (source, distance, layer), gate, (x, truth), (test, tested), rank
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


def kept_tokens(tokens: int) -> torch.Tensor:
    """bool [tokens]: what is kept for the penalty and the calibration, every fifth block."""
    block = min(BLOCK_TOKENS, tokens // KEPT_PART)
    return torch.arange(tokens) // block % KEPT_PART == KEPT_PART - 1


def rare_experts(picks: torch.Tensor, experts: int) -> torch.Tensor:
    """bool [T, experts]: picked by none of the `RARE_AFTER` tokens before, by one trace's `picks`
    int64 [T, k]. Its first tokens have none: what was picked before them is not known."""
    at = torch.arange(len(picks), device=picks.device).unsqueeze(1)
    latest = torch.full((len(picks) + 1, experts), -1, device=picks.device)
    latest[1:].scatter_(1, picks, at.expand_as(picks))
    before = latest.cummax(0).values[:-1]
    return at - before > RARE_AFTER


def _learn_one(
    key: Key,
    gate: GateWeights,
    fitting: tuple[torch.Tensor, _Truth],
    measuring: tuple[torch.Tensor, _Truth],
    rank: int,
) -> Result:
    x, truth = fitting
    top_k = truth.picks.shape[1]
    kept = kept_tokens(len(x)).to(x.device)
    changes = fit_changes(x[~kept], truth.logits[~kept], gate, min(rank, len(gate.bias)))
    test, tested = x[kept], truth.of(kept)
    scored = [margins(test, change.applied(gate), top_k) for change in changes]
    recalls = [quality(s, tested.picks, tested.rare, 1.0, 0.0).recall_k for s in scored]
    best = max(range(len(changes)), key=recalls.__getitem__)
    chosen = changes[best]
    fitted_calibration = calibrate_rare(scored[best], tested.picks, tested.rare)
    own_calibration = calibrate_rare(margins(test, gate, top_k), tested.picks, tested.rare)
    if len(measuring[0]):
        test, tested = measuring
    fitted = margins(test, chosen.applied(gate), top_k)
    return Result(
        key,
        FittedGates.tensors(key, chosen.up, chosen.down, *fitted_calibration),
        quality(margins(test, gate, top_k), tested.picks, tested.rare, *own_calibration),
        quality(fitted, tested.picks, tested.rare, *fitted_calibration),
    )


def calibrate_rare(
    scores: torch.Tensor, picks: torch.Tensor, rare: torch.Tensor
) -> tuple[float, float]:
    """(slope, offset) of log-odds over the rare ones of the experts that would be named, twice
    top-k; `scores` [T, E], `picks` int64 [T, k], `rare` bool [T, E]."""
    picked = torch.zeros_like(rare).scatter_(1, picks, True)
    named = torch.zeros_like(rare)
    named.scatter_(1, scores.topk(min(2 * picks.shape[1], scores.shape[1]), -1).indices, True)
    if (named & rare & picked).sum() >= LEAST_RARE_PICKS:
        named &= rare
    return calibrate(scores[named], picked[named])


def _truth(
    traces: Sequence[InputsTrace],
    layer: int,
    gate: GateWeights,
    top_k: int,
    device: torch.device,
) -> _Truth:
    experts = len(gate.bias)
    logits = [x @ gate.weight.float().T for x in _traced(traces, layer, MOE, device)]
    picks = [_picks(of_trace, gate, top_k) for of_trace in logits]
    rare = [rare_experts(of_trace, experts) for of_trace in picks]
    none = torch.empty(0, experts, device=device)
    return _Truth(
        torch.cat([none, *logits]),
        torch.cat([none[:, :top_k].long(), *picks]),
        torch.cat([none.bool(), *rare]),
    )


def _picks(logits: torch.Tensor, gate: GateWeights, top_k: int) -> torch.Tensor:
    biased = torch.nn.functional.softplus(logits).sqrt() + gate.bias
    return biased.topk(top_k, -1).indices


def _inputs(
    traces: Sequence[InputsTrace], layer: int, source: str, device: torch.device
) -> torch.Tensor:
    return torch.cat([torch.empty(0, device=device), *_traced(traces, layer, source, device)])


def _traced(
    traces: Sequence[InputsTrace], layer: int, source: str, device: torch.device
) -> list[torch.Tensor]:
    """fp32 [T, D] of each trace."""
    return [
        torch.from_numpy(trace.layer(layer)[source == MOE]).to(device).float() for trace in traces
    ]


def _mean(qualities: Sequence[Quality]) -> dict[str, float]:
    """NaN, which stands where a layer named none, is left out."""
    names = [field.name for field in fields(Quality)]
    each = {name: [getattr(quality, name) for quality in qualities] for name in names}
    counted = {name: [v for v in values if not math.isnan(v)] for name, values in each.items()}
    return {name: sum(v) / len(v) if v else math.nan for name, v in counted.items()}
