"""Every expert of the mini checkpoint in host memory, as an arena would hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from compute.resident import ResidentExperts
from compute.slot_views import HeldExpert
from tests.golden.cases import DEVICE
from tests.golden.harness import config, shards


class HeldExperts:
    """What a DeviceExperts asks of the arena, as if all came from a disk; pinned where there is a
    GPU. `asked` counts holds."""

    def __init__(self) -> None:
        held = ResidentExperts.read(shards(), torch.device("cpu"))
        self._memory: dict[tuple[int, int], HeldExpert] = {}
        self.asked = 0
        for layer in range(config().num_hidden_layers):
            for expert, parts in held.fetch(layer, range(config().n_routed_experts)):
                in_order = (parts.w1, parts.w3, parts.w2)
                in_order += (parts.w1_scale, parts.w3_scale, parts.w2_scale)
                sizes = [part.nbytes for part in in_order]
                memory = torch.cat([part.flatten() for part in in_order])
                if DEVICE.type == "cuda":
                    memory = memory.pin_memory()
                place = [sum(sizes[:at]) for at in range(6)]
                self._memory[layer, expert] = HeldExpert(memory, place)
        self.fetch, self.hint, self.release = held.fetch, held.hint, held.release

    def hold(
        self, layer: int, experts: Sequence[int], asking: Callable[[], None] | None = None
    ) -> list[HeldExpert]:
        self.asked += 1
        if asking is not None:
            asking()
        return [self._memory[layer, expert] for expert in experts]

    def read_until(self, event: torch.cuda.Event) -> None:
        """Nothing is ever rewritten."""
