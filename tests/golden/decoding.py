"""The mini checkpoint's decode step through the kernels (their references on a CPU)."""

from __future__ import annotations

from functools import cache

import torch

from compute.decode.arguments import Arguments
from compute.decode.assembly import AnyDecoder
from compute.decode.decoder import Decoder
from compute.decode.graphs import Eager, SegmentRunner
from compute.decode.step import DecodeStep
from compute.sequence import SequenceState
from compute.sources import EngramSource, PlacedExperts
from compute.weights import ModelWeights
from tests.golden import harness
from tests.golden.cases import DEVICE, case

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


def tokens_of(name: str) -> tuple[list[int], int]:
    """Prompt and decode tokens, and the prompt's length."""
    golden = case(name)
    tokens = torch.cat((golden["prompt_ids"], golden["decode.input_ids"])).tolist()
    return tokens, len(golden["prompt_ids"])


def request(engram: EngramSource, tokens: list[int], at: int) -> int:
    reach = harness.config().engram_max_ngram_size - 1
    return engram.request(at, tokens[at : at + 1], tokens[max(at - reach, 0) : at])


def decode(
    decoder: AnyDecoder, engram: EngramSource, tokens: list[int], state: SequenceState, steps: int
) -> torch.Tensor:
    """Logits [steps, V] of the tokens that follow in `state`."""
    rows = []
    for at in range(state.length, state.length + steps):
        ticket = request(engram, tokens, at)
        rows.append(decoder.forward(tokens[at], state, ticket))
        engram.done(ticket)
    return torch.stack(rows)
