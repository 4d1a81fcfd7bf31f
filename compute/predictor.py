"""Which experts a later layer will likely want: a gate, applied to what is known earlier.

Owns the arithmetic and the file of fitted gates that may lie beside a checkpoint. A fitted gate has
the form of the layer's own, so it costs the same; where none was fitted the layer's own serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from compute.layers.hyper_connections import Mixes, collapse_norm
from compute.layers.moe import gate_scores
from compute.weights import GateWeights
from protocol.errors import CheckpointError

FITTED_FORMAT = "headrace fitted gates 1"


class Prediction(NamedTuple):
    """int64 `experts` [n], best first, and fp32 `margins` [n] above (or below) the cut at top-k."""

    experts: torch.Tensor
    margins: torch.Tensor


def predict(x: torch.Tensor, gate: GateWeights, top_k: int, count: int) -> Prediction:
    """The `count` experts that `gate` puts highest for any token of bf16 `x` [T, D].

    An expert's margin is its biased score less the token's `top_k`-th best, at the token where that
    is largest: with this input the gate would pick exactly the experts whose margin is 0 or more.
    """
    biased = gate_scores(x, gate).add_(gate.bias)
    count = min(count, biased.shape[1])
    if len(x) == 1 and count >= top_k:
        # One ranking has the cut too.
        highest, experts = biased[0].topk(count)
        return Prediction(experts, highest - highest[top_k - 1])
    cut = biased.topk(top_k, -1).values[:, -1:]
    best = (biased - cut).amax(0).topk(count)
    return Prediction(best.indices, best.values)


def before_attention(
    streams: torch.Tensor, mixes: Mixes, ffn_norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """bf16 [T, D]: a layer's MoE input if its attention added nothing to `streams` [T, hc, D].

    `mixes` are its attention's, made from the same streams. Writing nothing back and collapsing
    what was carried over is one mix of the streams, comb times pre; only the attention's own output
    is missing.
    """
    carried = torch.bmm(mixes.comb, mixes.pre.unsqueeze(-1)).squeeze(-1)
    return collapse_norm(streams, carried, ffn_norm, eps)


Margins = TypeVar("Margins", float, torch.Tensor)


@dataclass(frozen=True, slots=True)
class PredictingGate:
    """What predicts. Its scores are `margin * slope + offset`: log-odds of a pick where it was
    fitted, the margins themselves where it is a layer's own gate."""

    weights: GateWeights
    slope: float = 1.0
    offset: float = 0.0

    def scores(self, margins: Margins) -> Margins:
        """Of fp32 `margins` [n], or of one."""
        return margins * self.slope + self.offset


# (source, distance, target layer), as in `protocol.route_trace.Predictor`.
Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class FittedGates:
    """What `headrace fit` keeps beside a checkpoint; `gates` by source, distance and target.

    A fitted gate is the target's own, moved so that on an earlier input it says what the target's
    will say on its own input.
    """

    gates: Mapping[Key, PredictingGate]

    def gate(self, source: str, distance: int, layer: int, own: GateWeights) -> PredictingGate:
        """The gate that predicts `layer`: the fitted one, or its `own`."""
        return self.gates.get((source, distance, layer)) or PredictingGate(own)

    @classmethod
    def load(cls, path: Path, own: Sequence[GateWeights], identity: str) -> FittedGates:
        """Those of the file at `path`, made from the layers' `own` gates and on their device.

        Raises CheckpointError for a file that is damaged, or was fitted for another checkpoint than
        the one of this `identity`.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); fit it again") from None
        if metadata.get("format") != FITTED_FORMAT:
            raise CheckpointError(f"{path}: is no predictor of this program; fit it again")
        if metadata.get("identity") != identity:
            raise CheckpointError(f"{path}: was fitted for another checkpoint; fit it again")
        try:
            gates = {key: _moved(tensors, key, own) for key in map(_key, _stems(tensors))}
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError):
            raise CheckpointError(
                f"{path}: its tensors do not fit the model; fit it again"
            ) from None
        return cls(gates)

    @staticmethod
    def tensors(
        key: Key, up: torch.Tensor, down: torch.Tensor, slope: float, offset: float
    ) -> dict[str, torch.Tensor]:
        """How one gate is kept: `up` [E, r] times `down` [r, D] is added to the layer's gate."""
        stem = ".".join(map(str, key))
        return {
            f"{stem}.up": up.half().contiguous(),
            f"{stem}.down": down.half().contiguous(),
            f"{stem}.calibration": torch.tensor([slope, offset], dtype=torch.float32),
        }


def _stems(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in tensors})


def _key(stem: str) -> Key:
    source, distance, layer = stem.split(".")
    return source, int(distance), int(layer)


def _moved(
    tensors: Mapping[str, torch.Tensor], key: Key, own: Sequence[GateWeights]
) -> PredictingGate:
    up, down, calibration = (
        tensors[".".join(map(str, (*key, part)))].float() for part in ("up", "down", "calibration")
    )
    gate = own[key[2]]
    slope, offset = calibration.tolist()
    moved = gate.weight.float() + (up @ down).to(gate.weight.device)
    if moved.shape != gate.weight.shape:
        raise ValueError(f"{key}: of another shape")
    if not (moved.isfinite().all() and math.isfinite(slope) and math.isfinite(offset)):
        raise ValueError(f"{key}: not finite")
    return PredictingGate(GateWeights(moved.to(gate.weight.dtype), gate.bias), slope, offset)


NO_FITTED_GATES = FittedGates({})
