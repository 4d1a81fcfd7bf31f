"""Records routes while the model runs: what `--route-trace` writes.

Owns the trace files and what every predictor says at every distance, most of which nobody else asks
for. Nothing of this runs when no trace is wanted. The arithmetic of the pass is not touched. The
time this takes is left out of the times it records, and a pass over one token is over before
predictors are asked: between the layers they would warm up a processor that has just waited.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from compute.layers.hyper_connections import Mixes
from compute.layers.moe import Routing
from compute.predictor import FittedGates, before_attention, predict
from compute.weights import ModelWeights
from protocol.config import ModelConfig
from protocol.errors import ResourceError
from protocol.route_trace import (
    FITTED,
    GATE,
    MOE,
    STREAM,
    InputsWriter,
    Predictor,
    RouteTraceWriter,
    Step,
    TraceHeader,
    inputs_path,
)
from protocol.tensor_table import TILE

DISTANCES = (1, 2, 3)
# Margins of real gates lie within +-2; a step of 1/64 keeps their order.
MARGIN_STEP = 1 / 64
LOG_ODDS_STEP = 1 / 8

# resident(layer, experts): whether each is in the cache now.
ResidentNow = Callable[[int, Sequence[int]], Sequence[bool]]


class RouteRecorder:
    """Fed by `compute.Model` in the order of a pass; writes a step when the pass is over."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        weights: ModelWeights,
        fitted: FittedGates,
        *,
        identity: str,
        slots: int,
        resident: ResidentNow,
        stalled: Callable[[], float],
        with_inputs: bool,
    ) -> None:
        """`stalled` gives the seconds waited for experts since the start. Raises ResourceError."""
        self._config = config
        self._weights = weights
        self._fitted = fitted
        self._resident = resident
        self._stalled = stalled
        self.header = _header(config, fitted, identity, slots)
        self._writer = RouteTraceWriter(path, self.header)
        self._inputs = InputsWriter(inputs_path(path), self.header) if with_inputs else None
        self._step = 0
        self._failed = False

    def begin(self, start: int, tokens: int) -> None:
        """A pass over `tokens` tokens at position `start` begins."""
        header = self.header
        picked = (header.layers, tokens, header.top_k)
        named = (len(header.predictors), header.layers, header.named(tokens))
        self._start = start
        self._picks = np.zeros(picked, np.int64)
        self._kept_weights = np.zeros(picked, np.float32)
        self._was_resident = np.zeros(picked, np.bool_)
        self._predicted = np.zeros(named, np.int64)
        self._scores = np.full(named, np.nan, np.float32)
        self._seconds = np.zeros((header.layers, 3), np.float32)
        self._postponed: list[Callable[[], None]] | None = [] if tokens == 1 else None
        self._waited = self._stalled()
        self._resumed = time.monotonic()

    def entered(self, layer: int, streams: torch.Tensor, mixes: Mixes) -> None:
        """`layer` begins with `streams` bf16 [T, hc, D]; its attention's `mixes` are known."""
        self._seconds[layer, 0] = time.monotonic() - self._resumed
        self._do(partial(self._entered, layer, streams, mixes))
        self._resumed = time.monotonic()

    def routed(self, layer: int, x: torch.Tensor, routing: Routing) -> None:
        """`layer` chose by bf16 `x` [T, D]; nothing of what it picked has been fetched yet."""
        self._seconds[layer, 0] += time.monotonic() - self._resumed
        picks = routing.picks.cpu().numpy()
        self._picks[layer] = picks
        self._kept_weights[layer] = routing.weights.cpu().numpy()
        distinct = np.unique(picks).tolist()
        here = np.zeros(self.header.experts, np.bool_)
        here[distinct] = self._resident(layer, distinct)
        self._was_resident[layer] = here[picks]
        self._do(partial(self._routed, layer, x))
        self._resumed = time.monotonic()

    def left(self, layer: int) -> None:
        """`layer` is done."""
        waited = self._stalled()
        self._seconds[layer, 2] = waited - self._waited
        running = time.monotonic() - self._resumed - self._seconds[layer, 2]
        self._seconds[layer, 1] = max(0.0, running)
        self._waited = waited
        self._resumed = time.monotonic()

    def end(self) -> None:
        """The pass is over."""
        for action in self._postponed or ():
            action()
        step = Step(
            self._step,
            self._start,
            self._picks,
            self._kept_weights,
            self._was_resident,
            self._predicted,
            self._scores,
            self._seconds,
        )
        self._keep(partial(self._writer.write, step))
        self._step += 1

    def _do(self, action: Callable[[], None]) -> None:
        """Now, or when the pass is over: inputs of many tokens would take too much memory."""
        if self._postponed is None:
            action()
        else:
            self._postponed.append(action)

    def _entered(self, layer: int, streams: torch.Tensor, mixes: Mixes) -> None:
        self._ahead = before_attention(
            streams, mixes, self._weights.layers[layer].ffn_norm, self._config.rms_norm_eps
        )
        self._say(STREAM, layer - 1, self._ahead)

    def _routed(self, layer: int, x: torch.Tensor) -> None:
        self._say(MOE, layer, x)
        if self._inputs is not None:
            halves = _half(self._ahead), _half(x)
            self._keep(partial(self._inputs.write, self._step, layer, *halves))

    def _keep(self, write: Callable[[], None]) -> None:
        """Write unless that has failed before: a full disk ends the recording, not a request."""
        if self._failed:
            return
        try:
            write()
        except ResourceError as error:
            self._failed = True
            print(f"{error}; the route trace ends here", file=sys.stderr, flush=True)

    def _say(self, source: str, done: int, x: torch.Tensor) -> None:
        """What predictors of `source` say by `x`, when layer `done` is the last one known."""
        count = self._predicted.shape[2]
        for number, predictor in enumerate(self.header.predictors):
            target = done + predictor.distance
            if predictor.source == source and target < self.header.layers:
                own = self._weights.layers[target].gate
                gate = self._fitted.gate(source, predictor.distance, target, own)
                said = predict(x, gate.weights, self.header.top_k, count)
                self._predicted[number, target] = said.experts.cpu().numpy()
                self._scores[number, target] = gate.scores(said.margins).cpu().numpy()


def _header(config: ModelConfig, fitted: FittedGates, identity: str, slots: int) -> TraceHeader:
    matrix = config.hidden_size * config.moe_intermediate_size
    return TraceHeader(
        identity,
        config.num_hidden_layers,
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.hidden_size,
        3 * (matrix // 2 + matrix // TILE),
        slots,
        2 * config.num_experts_per_tok,
        tuple(
            _predictor(source, distance, fitted)
            for source in (MOE, STREAM)
            for distance in DISTANCES
        ),
    )


def _predictor(source: str, distance: int, fitted: FittedGates) -> Predictor:
    if any(key[:2] == (source, distance) for key in fitted.gates):
        return Predictor(FITTED, source, distance, LOG_ODDS_STEP)
    return Predictor(GATE, source, distance, MARGIN_STEP)


def _half(x: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    return x.half().cpu().numpy()
