"""The mini checkpoint's decode step through the kernels (their references on a CPU)."""

from __future__ import annotations

from functools import cache

from compute.decode.arguments import Arguments
from compute.decode.decoder import Decoder
from compute.decode.graphs import Eager, SegmentRunner
from compute.decode.step import DecodeStep
from compute.sources import EngramSource, PlacedExperts
from compute.weights import ModelWeights
from tests.golden import harness
from tests.golden.cases import DEVICE

PREDICTIONS = 5


@cache
def arguments() -> Arguments:
    weights = ModelWeights.load(harness.shards(), DEVICE, stored=True)
    return Arguments.of(weights, predict=True)


def mini_step(*, reference_index_keys: bool = True) -> DecodeStep:
    return DecodeStep(
        harness.config(),
        arguments(),
        predictions=PREDICTIONS,
        reference_index_keys=reference_index_keys,
    )


def mini_decoder(
    engram: EngramSource,
    *,
    experts: PlacedExperts | None = None,
    runner: SegmentRunner | None = None,
    step: DecodeStep | None = None,
    reference_index_keys: bool = True,
) -> Decoder:
    step = step or mini_step(reference_index_keys=reference_index_keys)
    return Decoder(step, runner or Eager(), experts or harness.experts(), engram)
