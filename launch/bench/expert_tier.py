"""compute's expert sources over the expert group, for benchmarks that run the model themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from compute.arena_experts import ArenaExperts
from compute.device_experts import DeviceExperts
from compute.interruption import Interruption
from compute.progress import ProgressPage
from compute.slot_views import slot_views
from launch.bench.expert_group import ExpertGroup
from protocol.config import ModelConfig
from protocol.trace import Tracer

STALL_TIMEOUT_S = 60.0


@contextmanager
def arena_experts(
    checkpoint: Path, device: torch.device, slots: int, readers: int
) -> Iterator[ArenaExperts]:
    """The arena's source as the compute process has it: service and readers are real."""
    with ExpertGroup(checkpoint, slots=slots, readers=readers) as group:
        yield experts_of(group, device)


def experts_of(group: ExpertGroup, device: torch.device) -> ArenaExperts:
    """compute's source over a group that runs."""
    return ArenaExperts(
        group.compute,
        group.directory,
        group.arena,
        ProgressPage(group.progress),
        slot_views(group.arena, group.config, device),
        Tracer("bench"),
        stall_timeout=STALL_TIMEOUT_S,
        verify_slots=False,
        busy_poll=group.busy_poll,
        interruption=_Deaths(group),
    )


class _Deaths(Interruption):
    """Asked in every wait: nobody else watches the processes of a benchmark."""

    def __init__(self, group: ExpertGroup) -> None:
        super().__init__()
        self._group = group

    def check(self) -> None:
        self._group.raise_deaths()


def fill(tier: DeviceExperts, config: ModelConfig) -> None:
    """Bring every expert of the checkpoint onto the device; `tier` has slots for all."""
    for layer in range(config.num_hidden_layers):
        for first in range(0, config.n_routed_experts, config.num_experts_per_tok):
            last = min(first + config.num_experts_per_tok, config.n_routed_experts)
            tier.place(layer, range(first, last))
            tier.release()
