"""Compute's two sources in the test's process, with their services' ends played by others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import zmq

from compute import arena_experts
from compute.arena_experts import ArenaExperts
from compute.progress import ProgressPage
from compute.resident import ResidentExperts
from compute.slot_views import slot_views
from compute.sources import ExpertBytes
from protocol.config import ModelConfig
from protocol.layouts import PLACES, Arena, Directory, Progress
from protocol.shards import Shards
from protocol.tensor_table import expert_tensor
from protocol.trace import Tracer
from protocol.transport import Channel, Endpoints
from tests.ipc.fake_expert_service import Orders

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
CPU = torch.device("cpu")


@lru_cache
def mini_config() -> ModelConfig:
    return ModelConfig.load(MINI)


@lru_cache
def mini_shards() -> Shards:
    return Shards.open(MINI, mini_config())


@lru_cache
def resident() -> ResidentExperts:
    """Every expert of the mini checkpoint, to compare with."""
    return ResidentExperts.read(mini_shards(), CPU)


def expert_nbytes() -> int:
    """Bytes of one expert's six tensors."""
    names = (expert_tensor(0, 0, *place.split(".")) for place in PLACES)
    return sum(mini_shards().tensors[name].nbytes for name in names)


def same_bytes(one: ExpertBytes, other: ExpertBytes) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class ExpertRig:
    """An arena of `slots`, a fake service process with `orders`, and ArenaExperts over both."""

    def __init__(
        self,
        slots: int,
        *,
        stall_timeout: float = 20.0,
        verify_slots: bool = True,
        trace: str = "",
        **orders: Any,
    ) -> None:
        config = mini_config()
        self.stall_timeout, self.verify_slots, self.trace = stall_timeout, verify_slots, trace
        self.arena = Arena.create(slots=slots, slot_bytes=expert_nbytes(), pieces=1)
        self.directory = Directory.create(
            layers=config.num_hidden_layers, experts=config.n_routed_experts, slots=slots
        )
        self.progress = Progress.create(words_count=Progress.COUNT)
        self.runtime = Path(tempfile.mkdtemp(prefix="hr-"))
        self.log = self.runtime / "log"
        self.orders = Orders(
            Endpoints.under(self.runtime).experts,
            str(MINI),
            self.arena.fd,
            self.directory.fd,
            self.progress.fd,
            log=str(self.log),
            **orders,
        )

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.ipc.fake_expert_service",
                json.dumps(asdict(self.orders)),
            ],
            pass_fds=(self.arena.fd, self.directory.fd, self.progress.fd),
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel = Channel.connect(
            self.context, self.orders.endpoint, "compute", arena_experts.ACCEPTS
        )
        self.tracer = Tracer("compute", self.trace)
        self.page = ProgressPage(self.progress)
        self.experts = ArenaExperts(
            self.channel,
            self.directory,
            self.arena,
            self.page,
            slot_views(self.arena, mini_config(), CPU),
            self.tracer,
            stall_timeout=self.stall_timeout,
            verify_slots=self.verify_slots,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.channel.close()
        self.context.destroy(linger=0)
        del self.experts
        for region in (self.arena, self.directory, self.progress):
            region.close()
        shutil.rmtree(self.runtime)

    def messages(self, kind: str) -> list[str]:
        """Messages of a type that the service has got, as text."""
        if not self.log.exists():
            return []
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith(f"{kind}(")]
