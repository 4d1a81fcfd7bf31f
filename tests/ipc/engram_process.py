"""A real engram process, and its two peers played by the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import zmq

from engram_io.hashing import NgramHash
from engram_io.token_map import TokenMap
from protocol.config import ModelConfig
from protocol.layouts import EngramRing
from protocol.messages import (
    EngramFailed,
    EngramReady,
    EngramRequest,
    Hello,
    Loading,
    Ready,
    StatsReply,
    StatsRequest,
    Stop,
    TraceStart,
    TraceStop,
    TraceStopped,
)
from protocol.shards import Shards
from protocol.specs import EngramServiceSpec
from protocol.transport import Channel, Endpoints
from protocol.wire import Message

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
BLOCKS, BLOCK_TOKENS = 2, 64
TIMEOUT_S = 20.0

M = TypeVar("M", bound=Message)
Bytes = npt.NDArray[np.uint8]


@dataclass
class EngramProcess:
    """Start with `with EngramProcess(…) as engram`; `spec` fields may be overridden by keyword."""

    checkpoint: Path = MINI
    threads: int = 32
    cache_bytes: int = 1 << 20
    direct: bool = True
    busy_poll: float = 0.0
    latency: float = 0.0
    faults: str = ""
    trace: str = ""
    ring: EngramRing | None = None
    wait_ready: bool = True
    process: subprocess.Popen[str] = field(init=False)
    ready: Ready = field(init=False)

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="hr-"))
        endpoints = Endpoints.under(self.directory)
        self.config = ModelConfig.load(MINI)
        self.ring = self.ring or EngramRing.create(
            blocks=BLOCKS,
            layers=len(self.config.engram_layer_ids),
            block_tokens=BLOCK_TOKENS,
            rows=self.config.engram_rows_per_token,
            head_dim=self.config.engram_head_dim,
        )
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control = Channel.bind(
            self.context, endpoints.control, (Hello, Loading, Ready, StatsReply, TraceStopped)
        )
        self.endpoint = endpoints.engram
        spec = EngramServiceSpec(
            endpoints.control,
            endpoints.engram,
            str(self.checkpoint),
            self.ring.fd,
            self.threads,
            self.cache_bytes,
            self.direct,
            self.busy_poll,
            self.latency,
            self.faults,
            self.trace,
        )
        self.process, self.pipe = start(spec, self.ring.fd)
        self.requests = Channel.connect(
            self.context, endpoints.engram, "compute", (EngramReady, EngramFailed)
        )
        if self.wait_ready:
            self.ready = self.from_control(Ready)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)
        if self.pipe >= 0:
            os.close(self.pipe)
        self.requests.close()
        self.control.close()
        self.context.destroy(linger=0)
        assert self.ring is not None
        self.ring.close()
        shutil.rmtree(self.directory)

    def from_control(self, kind: type[M]) -> M:
        """The next message of `kind`; hints of progress before it are passed over."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            received = self.control.receive(deadline - time.monotonic())
            if received is not None and isinstance(received[1], kind):
                return received[1]
            assert self.process.poll() is None, self.process.communicate()
        raise AssertionError(f"no {kind.__name__} within {TIMEOUT_S} s")

    def ask(
        self, ticket: int, tokens: list[int], start: int = 0, history: list[int] | None = None
    ) -> None:
        """Send a request."""
        assert self.requests.send(EngramRequest(ticket, start, tokens, history or []))

    def answer(self) -> Message:
        """The service's next message to compute."""
        received = self.requests.receive(TIMEOUT_S)
        assert received is not None, f"no answer within {TIMEOUT_S} s"
        return received[1]

    def answers(self, ticket: int) -> list[Message]:
        """Everything up to the last answer of a ticket."""
        collected = [self.answer()]
        while not isinstance(collected[-1], EngramFailed) and collected[-1] != EngramReady(
            ticket, 1
        ):
            collected.append(self.answer())
        return collected

    def stats(self) -> dict[str, float]:
        """The service's counters."""
        assert self.control.send(StatsRequest(1), "engram")
        return self.from_control(StatsReply).counters

    def trace_on(self, path: Path) -> None:
        assert self.control.send(TraceStart(str(path)), "engram")

    def trace_off(self) -> None:
        assert self.control.send(TraceStop(), "engram")
        self.from_control(TraceStopped)

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        assert self.control.send(Stop(), "engram")
        return self.process.wait(TIMEOUT_S)

    def check_rows(self, ticket: int, tokens: list[int], history: list[int] | None = None) -> None:
        """Compare the ring block of a ticket with the shards, bit for bit."""
        assert self.ring is not None
        block, count = ticket % self.ring.blocks, len(tokens)
        shards = Shards.open(MINI, self.config)
        ngrams = NgramHash.from_config(
            self.config, TokenMap.load(MINI, self.config).classes, MINI / "config.json"
        )
        rows = ngrams.rows(tokens, history or [])
        for index, layer in enumerate(self.config.engram_layer_ids):
            assert self.ring.ready[block, index] == ticket + 1
            for part, found in (("weight", self.ring.codes), ("scale", self.ring.scales)):
                entry = shards.tensors[f"layers.{layer}.engram.embed.{part}"]
                table = np.fromfile(entry.path, np.uint8, entry.nbytes, offset=entry.offset)
                expected = table.reshape(entry.shape)[rows[index]]
                np.testing.assert_array_equal(found[block, index, :count], expected)


def start(spec: EngramServiceSpec, ring_fd: int) -> tuple[subprocess.Popen[str], int]:
    """Start the module as the supervisor does; the process and the pipe that keeps it alive."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "engram_io.service", str(reading), str(os.getpid())],
        pass_fds=(reading, ring_fd),
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(reading)
    frame = spec.encode()
    os.write(writing, len(frame).to_bytes(4, "little") + frame)
    return process, writing
