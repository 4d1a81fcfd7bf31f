"""The page that tells the others how far compute has come and what it demands; compute is its only
writer.

Promises: a reader that sees an epoch or a finished demand sees it after everything compute did
before publishing it.
"""

from __future__ import annotations

import time

from protocol.early_copies import EarlySender
from protocol.layouts import Progress, full_fence


class ProgressPage:
    """Compute's side of `protocol.layouts.Progress`."""

    def __init__(self, region: Progress) -> None:
        self._words = region.words
        self._demands = EarlySender(region.demands)

    @property
    def step(self) -> int:
        """The forward pass at hand, counted over the life of the process."""
        return int(self._words[Progress.STEP])

    @property
    def layer(self) -> int:
        """The layer that the pass at hand has come to."""
        return int(self._words[Progress.LAYER])

    def begin_step(self) -> None:
        """Another forward pass begins."""
        self._words[Progress.LAYER] = 0
        self._words[Progress.STEP] += 1
        self.beat()

    def at_layer(self, layer: int) -> None:
        """The pass has come to `layer`."""
        self._words[Progress.LAYER] = layer
        self.beat()

    def beat(self) -> None:
        """Compute is alive, even where it waits."""
        self._words[Progress.HEARTBEAT] = time.monotonic_ns()

    def holds_no_slot(self) -> None:
        """Advance the epoch: compute reads no slot it has found in the directory up to now.

        What is found after this call returns is held again, until the next one.
        """
        # The first fence keeps reads of slots before the store, the second keeps later reads of the
        # directory behind it.
        full_fence()
        self._words[Progress.EPOCH] += 1
        full_fence()

    def demands(self, frame: bytes) -> None:
        """Show an encoded demand, about to be sent, to a service that looks."""
        self._demands.put(frame)

    def used(self, demand: int) -> None:
        """The experts of all demands up to `demand` may be evicted."""
        full_fence()
        self._words[Progress.DEMAND_DONE] = demand
