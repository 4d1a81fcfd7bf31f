"""A route trace as the layer passes that are replayed: picks, times, and what is foretold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from launch.simulate.replay import LayerPass, Said
from protocol.errors import UsageError
from protocol.route_trace import MOE, RouteTrace, Step

Floats = npt.NDArray[np.float64]

OFF, ORACLE = "off", "oracle"
ORACLE_DISTANCES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds a layer takes, up to its routing, after it, and more for each time it waited; None:
    as recorded."""

    layer_s: float | None
    # Of a layer's time, what lies before its routing, where nothing was recorded to go by.
    BEFORE = 0.5

    def of(self, step: Step, waking: Waking) -> Floats:
        """float64 [layers, 3]."""
        recorded = waking.apart(step)
        if self.layer_s is None:
            return recorded
        recorded = recorded[:, :2]
        total = recorded.sum(1, keepdims=True)
        shares = np.where(total > 0, recorded / np.where(total > 0, total, 1.0), self.BEFORE)
        return np.concatenate([shares * self.layer_s, np.zeros_like(total)], axis=1)


class Waking:
    """What a layer took longer after its routing than with all of its experts there, for each that
    was missing: compute was waked for it, with cold caches. It need not be so in a replay, which
    has other misses."""

    LEAST = 16  # passes of a layer, with misses or without, to go by

    def __init__(self, trace: RouteTrace) -> None:
        """Of passes over one token; others are taken as recorded."""
        single = [step for step in trace if step.tokens == 1]
        after = np.array([step.seconds[:, 1] for step in single], np.float64)
        missing = np.array([self._missing(step) for step in single])
        layers = trace.header.layers
        self._each = np.zeros(layers)
        for layer in range(layers if single else 0):
            missed = missing[:, layer] > 0
            if min(missed.sum(), (~missed).sum()) >= self.LEAST:
                took, count = after[missed, layer].sum(), missing[missed, layer].sum()
                more = took - missed.sum() * np.median(after[~missed, layer])
                self._each[layer] = max(0.0, more / count)

    def apart(self, step: Step) -> Floats:
        """float64 [layers, 3]: up to routing, after it with all experts there, for each waking."""
        seconds = step.seconds.astype(np.float64)
        each = self._each if step.tokens == 1 else np.zeros_like(self._each)
        after = np.maximum(0.0, seconds[:, 1] - self._missing(step) * each)
        return np.stack([seconds[:, 0], after, each], axis=1)

    @staticmethod
    def _missing(step: Step) -> Floats:
        missing: Floats = (~step.resident).sum((1, 2)).astype(np.float64)
        return missing


class _Predictor(NamedTuple):
    place: int
    distance: int
    source: str


@dataclass(frozen=True, slots=True)
class Foretold:
    """Where predictions come from: names of the trace's predictors, `oracle`, `oracle:1` (only
    that far), or nothing."""

    name: str

    @property
    def predicts(self) -> bool:
        return self.name != OFF

    def check(self, trace: RouteTrace) -> None:
        """Raises UsageError for a predictor that the trace does not have."""
        self._said_by(trace)

    def passes(
        self, trace: RouteTrace, times: Times, first_step: int, most: int | None
    ) -> Iterator[LayerPass]:
        """Every layer pass of the first `most` steps, numbered from `first_step`."""
        predictors = self._said_by(trace)
        waking = Waking(trace)
        for number, step in enumerate(trace):
            if most is not None and number >= most:
                return
            seconds = times.of(step, waking)
            picks = [sorted(set(layer.flatten().tolist())) for layer in step.picks]
            for layer in range(trace.header.layers):
                yield LayerPass(
                    first_step + number,
                    layer,
                    float(seconds[layer, 0]),
                    float(seconds[layer, 1]),
                    picks[layer],
                    self._said(step, layer, picks, [p for p in predictors if p.source == MOE]),
                    step.tokens,
                    self._said_first(step, layer, picks, predictors),
                    float(seconds[layer, 2]),
                )

    def _said_first(
        self,
        step: Step,
        layer: int,
        picks: Sequence[Sequence[int]],
        predictors: Sequence[_Predictor],
    ) -> list[Said]:
        """What is known before `layer`'s attention."""
        stream = [predictor for predictor in predictors if predictor.source != MOE]
        return self._said(step, layer - 1, picks, stream) if stream and layer else []

    def _said_by(self, trace: RouteTrace) -> list[_Predictor]:
        """The nearest last: it has seen most."""
        if self.name == OFF or self.name.startswith(ORACLE):
            return []
        known = {
            p.name: _Predictor(i, p.distance, p.source)
            for i, p in enumerate(trace.header.predictors)
        }
        missing = [name for name in self.name.split("+") if name not in known]
        if missing:
            raise UsageError(
                f"{trace.path}: has no predictor {missing[0]}; "
                f"there are {', '.join(known) or 'none'}, {OFF} and {ORACLE}"
            )
        chosen = [known[name] for name in self.name.split("+")]
        return sorted(chosen, key=lambda predictor: -predictor.distance)

    def _said(
        self,
        step: Step,
        layer: int,
        picks: Sequence[Sequence[int]],
        predictors: Sequence[_Predictor],
    ) -> list[Said]:
        """What is known once `layer` is routed; of the stream, once it is over. As many experts as
        are picked, as compute publishes them."""
        if self.name.startswith(ORACLE):
            _, _, only = self.name.partition(":")
            distances = ORACLE_DISTANCES[: int(only or len(ORACLE_DISTANCES))]
            those = [layer + distance for distance in reversed(distances)]
            return [Said(a, picks[a], [1.0] * len(picks[a])) for a in those if a < len(picks)]
        said = []
        for index, distance, _ in predictors:
            ahead = layer + distance
            if ahead < len(picks) and not np.isnan(step.scores[index, ahead, 0]):
                experts, scores = step.predicted[index, ahead], step.scores[index, ahead]
                count = step.picks[ahead].size
                said.append(Said(ahead, experts[:count].tolist(), scores[:count].tolist()))
        return said


def future(traces: Sequence[RouteTrace], most: int | None) -> Iterator[tuple[int, tuple[int, int]]]:
    """Every pick as (time, key) for Belady; a time is one layer of one step."""
    at = 0
    for trace in traces:
        for number, step in enumerate(trace):
            if most is not None and number >= most:
                break
            for layer, picks in enumerate(step.picks):
                for expert in sorted(set(picks.flatten().tolist())):
                    yield at, (layer, expert)
                at += 1
