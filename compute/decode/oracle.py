"""Every segment run both ways from the same state, compared bit for bit.

Owns the comparison. For finding what a captured graph does otherwise than eager launches; a token
takes many times as long. What eager launches gave is overwritten by what the replay gives, so text
that was generated this way is the graphs' text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from compute.decode.graphs import Eager, Graphs, Launch
from compute.decode.step import DecodeStep

MOST_REPORTS = 20


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
        for name, tensor in found.items():
            # Bits, not values: NaN in scratch that nobody reads equals itself.
            got, want = (
                part.contiguous().view(-1).view(torch.uint8) for part in (tensor, wanted[name])
            )
            if torch.equal(got, want):
                continue
            self.differences += 1
            if self.differences <= MOST_REPORTS:
                print(
                    f"oracle: layer {segment}, position {self._step.state.length}: {name} differs "
                    f"between eager launches and the graph",
                    file=sys.stderr,
                )
