"""Every segment, and every token, run in all ways from the same state, compared bit for bit.

Owns the comparisons. For finding what a captured graph does otherwise than eager launches; a token
takes many times as long. What eager launches gave is overwritten by what the replay gives, so text
that was generated this way is the graphs' text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from compute.decode.decoder import Decoder
from compute.decode.graphs import Eager, Graphs, Launch
from compute.decode.step import DecodeStep
from compute.decode.token import TokenDecoder
from compute.sequence import SequenceState

R = TypeVar("R")
MOST_REPORTS = 20
# Buffers in which the host, or the device for it, says what is another thing each way.
_SAID_BY_THE_HOST = ("inputs", "tag", "given_up", "table")


class Differences:
    """Counts tensors that differed and says the first few on stderr."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, names: Sequence[str], where: str, graph: str) -> None:
        """`names` differed at `where` between eager launches and `graph`."""
        for name in names:
            self.count += 1
            if self.count <= MOST_REPORTS:
                print(
                    f"oracle: {where}: {name} differs between eager launches and {graph}",
                    file=sys.stderr,
                )


class Oracle:
    """A SegmentRunner over `graphs`. `differences` counts tensors that differed, `compared` the
    segments that were looked at; the first few differences are said on stderr."""

    def __init__(self, step: DecodeStep, graphs: Graphs) -> None:
        self._step = step
        self._graphs = graphs
        self._eager = Eager()
        self._found = Differences()
        self.compared = 0

    @property
    def differences(self) -> int:
        return self._found.count

    def run(self, segment: int, launch: Launch) -> None:
        _, names = both_ways(
            self._step.written(),
            lambda: self._eager.run(segment, launch),
            lambda: self._graphs.run(segment, launch),
        )
        self.compared += 1
        where = f"layer {segment // 2}, position {self._step.state.length}"
        self._found.add(names, where, "the graph")


class TokenOracle:
    """Every token as one graph first, then by `segments`, whose runner is an Oracle: three ways.

    What the graph missed is then there, so that eager launches ask for nothing new. `differences`
    counts tensors that differed in either comparison, `compared` the tokens.
    """

    def __init__(self, token: TokenDecoder, segments: Decoder, oracle: Oracle) -> None:
        self._token = token
        self._segments = segments
        self._oracle = oracle
        self._found = Differences()
        self.compared = 0

    @property
    def differences(self) -> int:
        return self._found.count + self._oracle.differences

    @torch.inference_mode()
    def forward(self, token: int, state: SequenceState, ticket: int) -> torch.Tensor:
        """As `Decoder.forward`."""
        step = self._token.step
        step.bind(state)
        tensors = {n: t for n, t in step.written().items() if not n.startswith(_SAID_BY_THE_HOST)}
        logits, names = both_ways(
            tensors,
            lambda: self._token.run(token, state, ticket),
            lambda: self._segments.forward(token, state, ticket),
        )
        self.compared += 1
        where = f"position {state.length - 1}"
        self._found.add(names, where, "the graph of the whole token")
        return logits


def both_ways(
    tensors: Mapping[str, torch.Tensor], first: Callable[[], object], second: Callable[[], R]
) -> tuple[R, list[str]]:
    """Run `first` and, from the same state of `tensors`, `second`, whose outcome stays: what
    `second` returned, and the names of the tensors that differ."""
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    first()
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        tensor.copy_(before[name])
    returned = second()
    return returned, list(differing(found, tensors))


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
