"""How a token's segments are launched: eagerly, or captured once and replayed; or all as one.

Owns the captured graphs. A graph has addresses baked in; they are compared at every replay, and a
difference captures the segment anew. A capture that fails is said once, and all goes on eagerly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Launch = Callable[[], None]


class SegmentRunner(Protocol):
    """Launches segments, numbered in the order of a token."""

    def run(self, segment: int, launch: Launch) -> None:
        """Do on the current stream what `launch` does."""
        ...


class Eager:
    """Every launch by itself."""

    def run(self, segment: int, launch: Launch) -> None:
        launch()


class TokenRunner(Protocol):
    """Runs a whole token while the caller goes on."""

    def start(self, launch: Launch) -> bool:
        """Begin what `launch` does, whose kernels have all run before; False where that cannot be
        without the caller."""
        ...

    def running(self) -> bool:
        """Whether it has not ended yet."""
        ...


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    launch: Launch
    baked: object

    def serves(self, launch: Launch, baked: object) -> bool:
        return self.launch is launch and (self.baked is baked or self.baked == baked)


class Graphs:
    """A segment runs eagerly at first, which compiles and loads its kernels; then it is captured.

    A graph serves the `launch` it was captured from and no other: host buffers are baked in too.
    `baked` tells all that a capture of now would bake in. `captures` counts them.
    """

    def __init__(self, device: torch.device, baked: Callable[[], object]) -> None:
        self._baked = baked
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._warm: set[int] = set()
        self._captured: dict[int, _Captured] = {}
        self._failed = False
        self.captures = 0

    def run(self, segment: int, launch: Launch) -> None:
        if segment not in self._warm:
            launch()
            self._warm.add(segment)
        elif not self.replay(segment, launch):
            launch()

    def replay(self, segment: int, launch: Launch) -> bool:
        """Replay `segment`, captured first if need be; False, and nothing done, where that fails.
        Every kernel of it has run before."""
        if self._failed:
            return False
        baked = self._baked()
        captured = self._captured.get(segment)
        if captured is None or not captured.serves(launch, baked):
            try:
                graph = self._capture(launch)
            except RuntimeError as error:
                self._give_up(error)
                return False
            captured = self._captured[segment] = _Captured(graph, launch, baked)
        captured.graph.replay()
        return True

    def _capture(self, launch: Launch) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Not `torch.cuda.graph`, which empties the allocator's cache for every segment.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        self.captures += 1
        return graph

    def _give_up(self, error: RuntimeError) -> None:
        self._failed = True
        self._captured.clear()
        reason = str(error).splitlines()[0]
        print(f"decode goes on without graphs: a capture failed ({reason})", file=sys.stderr)


class OneGraph:
    """A TokenRunner whose tokens are the one segment of `graphs`."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._ended = torch.cuda.Event()

    def start(self, launch: Launch) -> bool:
        started = self._graphs.replay(0, launch)
        if started:
            self._ended.record()
        return started

    def running(self) -> bool:
        return not self._ended.query()
