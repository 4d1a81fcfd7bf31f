"""Every routed expert's bytes held in this process: the forward pass without any I/O beside it.

For tests, for measuring what the process group costs, and for passes over made-up experts; a
released checkpoint does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from compute.sources import Addresses, ExpertBytes
from protocol.errors import CheckpointError
from protocol.shards import Shards, TensorEntry
from protocol.tensor_table import EXPERT_MATRICES, expert_tensor


def in_order(layer: int, experts: Sequence[int]) -> Sequence[int]:
    """Arrival in the order asked for."""
    return experts


class ResidentExperts:
    """An ExpertSource that never waits; `arrival` reorders what a fetch yields (for tests)."""

    def __init__(
        self,
        layers: Sequence[Sequence[ExpertBytes]],
        arrival: Callable[[int, Sequence[int]], Sequence[int]] = in_order,
    ) -> None:
        """`layers` has every expert of every layer."""
        self._layers = layers
        self._arrival = arrival

    @classmethod
    def read(
        cls,
        shards: Shards,
        device: torch.device,
        arrival: Callable[[int, Sequence[int]], Sequence[int]] = in_order,
    ) -> ResidentExperts:
        """All of a checkpoint's. Raises CheckpointError where a file was cut short."""
        config = shards.config
        experts = range(config.n_routed_experts)
        layers = range(config.num_hidden_layers)
        return cls(
            [[_read_expert(shards, at, expert, device) for expert in experts] for at in layers],
            arrival,
        )

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertBytes]]:
        held = self._layers[layer]
        return ((expert, held[expert]) for expert in self._arrival(layer, experts))

    def place(
        self, layer: int, experts: Sequence[int], asking: Callable[[], None] | None = None
    ) -> Addresses:
        held = self._layers[layer]
        return np.array([[part.data_ptr() for part in held[expert]] for expert in experts])

    def present(self, layer: int, experts: Sequence[int]) -> tuple[list[int], Addresses]:
        return list(experts), self.place(layer, experts)

    def hint(
        self,
        layer: int,
        picks: Sequence[int],
        predicted_layer: int | None,
        predicted: Sequence[int],
        scores: Sequence[float],
    ) -> None:
        """Nothing is ever missing."""

    def release(self) -> None:
        """Nothing is ever rewritten."""


def _read_expert(shards: Shards, layer: int, expert: int, device: torch.device) -> ExpertBytes:
    return ExpertBytes(
        *(
            _read_bytes(shards.tensors[expert_tensor(layer, expert, matrix, part)]).to(device)
            for matrix in EXPERT_MATRICES
            for part in ("weight", "scale")
        )
    )


def _read_bytes(entry: TensorEntry) -> torch.Tensor:
    buffer = torch.empty(entry.shape, dtype=torch.uint8)
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        got = file.readinto(buffer.numpy().data.cast("B"))
    if got != entry.nbytes:
        raise CheckpointError(
            f"{entry.path}: {entry.name} has {got} of {entry.nbytes} bytes; "
            "the file was cut short, fetch it again"
        )
    return buffer
