"""What the forward pass asks of whoever holds experts and engram rows.

Owns the two interfaces between arithmetic and I/O. `compute.resident` implements `ExpertSource`
inside one process; compute's process file implements both over shared memory and ZeroMQ. The
forward pass promises never to keep a view of expert bytes past the moment the interface names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.int64]


class ExpertBytes(NamedTuple):
    """One routed expert as on disk: uint8 views, two e2m1 codes a byte, one e8m0 byte a scale.

    With D = hidden_size and I = moe_intermediate_size: `w1`, `w3` [I, D/2] and their scales
    [I, D/32]; `w2` [D, I/2] and its scale [D, I/32]. Contiguous, and readable by the device that
    computes.
    """

    w1: torch.Tensor
    w1_scale: torch.Tensor
    w3: torch.Tensor
    w3_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


class ExpertSource(Protocol):
    """Gives the routed experts that one layer needs, in whatever order they are there."""

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertBytes]]:
        """Yield each of the distinct `experts` of `layer` exactly once, in order of arrival.

        What is missing is asked for by this call, before the first item is drawn. Those already
        resident come first, missing ones as they land. An item's bytes may be read until the next
        item is drawn or `release` is called, whichever comes first; a source whose device works
        asynchronously keeps them until that work is done. Abandoning the iterator is allowed.
        Raises ReadError where an expert cannot be read, StallError where one does not come in time.
        """
        ...

    def hint(
        self,
        layer: int,
        picks: Sequence[int],
        predicted_layer: int | None,
        predicted: Sequence[int],
        scores: Sequence[float],
    ) -> None:
        """Say what `layer` is about to fetch and what `predicted_layer` will likely want.

        `picks` are distinct and ascending. `predicted` is best first; its `scores` say how far an
        expert's gate score lies above the cut at top-k (from 0 up: it would be picked). After the
        last layer `predicted_layer` is None and nothing is predicted. May be called for several
        predicted layers, with the same picks, and once more for a layer of which more is known by
        now. Never blocks; may be dropped.
        """
        ...

    def release(self) -> None:
        """Compute holds no expert bytes any more: slots seen up to now may be rewritten.

        Called once a layer, after its last product was issued, and after a failure; on CUDA the
        source waits for the device (an event, not the host) before it lets a slot go.
        """
        ...


@runtime_checkable
class PlacedExperts(ExpertSource, Protocol):
    """An ExpertSource that also says where experts lie, all that a layer needs at once."""

    def place(
        self, layer: int, experts: Sequence[int], asking: Callable[[], None] | None = None
    ) -> Addresses:
        """int64 [n, 6]: for each of `experts` the addresses of its tensors, as in ExpertBytes.

        Each is a multiple of 16. The device may read them from what is launched on the current
        stream after this call, up to the next `release`; the caller knows that it reads none that
        were placed for another layer any more. Waits until all are there, having called `asking`
        before anybody is asked; raises ReadError and StallError as `fetch` does.
        """
        ...

    def present(self, layer: int, experts: Sequence[int]) -> tuple[list[int], Addresses]:
        """Those of `experts` that are there already, and their addresses as `place` gives them.

        Nobody is asked. They stay while `fetch` brings others, which are too many to be kept."""
        ...


class EngramSource(Protocol):
    """Gives the engram rows of a run of tokens, asked for before the pass that adds them."""

    def request(self, start: int, tokens: Sequence[int], history: Sequence[int]) -> int:
        """Ask for the rows of `tokens` at positions `start`, `start + 1`, ...; a ticket at once.

        `history` are the tokens directly before `start`, oldest first: min(start, n - 1) of them,
        where n = engram_max_ngram_size.
        """
        ...

    def here(self, ticket: int) -> bool:
        """Whether `rows` would give every engram layer's at once."""
        ...

    def rows(self, ticket: int, engram_layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for one engram layer's rows of a ticket.

        Returns codes uint8 [T, rows_per_token, head_dim] (e4m3) and scales uint8
        [T, rows_per_token, head_dim / 32] (e8m0), on any device, valid until `done(ticket)`.
        `engram_layer_index` counts in `engram_layer_ids`. Raises ReadError or StallError.
        """
        ...

    def done(self, ticket: int) -> None:
        """The ticket's rows are no longer read; called once, after a failure too."""
        ...


class Tracer(Protocol):
    """Where spans go; `protocol.trace` has the real one."""

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """A context that measures `name`; `args` are shown beside it."""
        ...


class NullTracer:
    """Measures nothing."""

    _nothing: AbstractContextManager[None] = nullcontext()

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        return self._nothing
