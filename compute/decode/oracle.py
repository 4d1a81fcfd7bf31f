"""Every segment, and every token, run in all ways from the same state, compared bit for bit.

Owns the comparisons. For finding what a captured graph does otherwise than eager launches; a token
takes many times as long. What eager launches gave is overwritten by what the replay gives, so text
that was generated this way is the graphs' text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import torch

from compute.decode.decoder import Decoder
from compute.decode.graphs import Eager, Graphs, Launch
from compute.decode.step import DecodeStep
from compute.decode.token import TokenDecoder
from compute.sequence import SequenceState

MOST_REPORTS = 20
# Buffers in which the host, or the device for it, says what is another thing each way.
_SAID_BY_THE_HOST = ("inputs", "tag", "given_up", "table")


class Oracle:
    """A SegmentRunner over `graphs`. `differences` counts tensors that differed, `compared` the
    segments that were looked at; the first few differences are said on stderr."""

    def __init__(self, step: DecodeStep, graphs: Graphs) -> None:
        self._step = step
        self._graphs = graphs
        self._eager = Eager()
        self.differences = 0
        self.compared = 0

    def run(self, segment: int, launch: Launch) -> None:
        tensors = self._step.written()
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        self._eager.run(segment, launch)
        wanted = {name: tensor.clone() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            tensor.copy_(before[name])
        self._graphs.run(segment, launch)
        self._compare(segment, tensors, wanted)

    def _compare(
        self, segment: int, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
    ) -> None:
        self.compared += 1
        for name in differing(found, wanted):
            self.differences += 1
            if self.differences <= MOST_REPORTS:
                print(
                    f"oracle: layer {segment}, position {self._step.state.length}: {name} differs "
                    f"between eager launches and the graph",
                    file=sys.stderr,
                )


class TokenOracle:
    """Every token as one graph first, then by `segments`, whose runner is an Oracle: three ways.

    What the graph missed is then there, so that eager launches ask for nothing new. `differences`
    counts tensors that differed in either comparison, `compared` the tokens.
    """

    def __init__(self, token: TokenDecoder, segments: Decoder, oracle: Oracle) -> None:
        self._token = token
        self._segments = segments
        self._oracle = oracle
        self._own = 0
        self.compared = 0

    @property
    def differences(self) -> int:
        return self._own + self._oracle.differences

    @torch.inference_mode()
    def forward(self, token: int, state: SequenceState, ticket: int) -> torch.Tensor:
        """As `Decoder.forward`."""
        step = self._token.step
        step.bind(state)
        tensors = {n: t for n, t in step.written().items() if not n.startswith(_SAID_BY_THE_HOST)}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        self._token.run(token, state, ticket)
        found = {name: tensor.clone() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            tensor.copy_(before[name])
        logits = self._segments.forward(token, state, ticket)
        self.compared += 1
        for name in differing(found, tensors):
            self._own += 1
            if self._own <= MOST_REPORTS:
                print(
                    f"oracle: position {state.length - 1}: {name} differs between eager launches "
                    "and the graph of the whole token",
                    file=sys.stderr,
                )
        return logits


def differing(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Names of the tensors that differ in a bit: NaN in scratch that nobody reads equals itself."""
    for name, tensor in found.items():
        got, want = (
            part.contiguous().view(-1).view(torch.uint8) for part in (tensor, wanted[name])
        )
        if not torch.equal(got, want):
            yield name
