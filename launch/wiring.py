"""Who gets which memory, socket and option: the start message of every child.

Owns the shared regions and the translation of `GroupOptions` into specs; starts nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from launch.memory import MemoryPlan
from launch.options import GroupOptions, format_size
from launch.processes import Launch
from launch.runtime_directory import RuntimeDirectory
from protocol.config import ModelConfig
from protocol.errors import ResourceError
from protocol.layouts import Arena, Directory, EarlyOrders, EngramRing, Progress
from protocol.specs import (
    ComputeSpec,
    EngramServiceSpec,
    ExpertServiceSpec,
    ReaderSpec,
    reader_name,
)

# One block for the chunk being computed and one for the chunk asked for ahead of it.
RING_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Regions:
    """The group's shared memory; the supervisor allocates it and writes none of it."""

    arena: Arena
    directory: Directory
    progress: Progress
    early_orders: EarlyOrders
    ring: EngramRing

    @classmethod
    def allocate(
        cls, config: ModelConfig, options: GroupOptions, plan: MemoryPlan, pieces: int
    ) -> Self:
        """`pieces` is the most that an expert is read in. Raises ResourceError where memory does
        not suffice."""
        arena = Arena.create(slots=plan.slots, slot_bytes=plan.slot_bytes, pieces=pieces)
        if options.pin == "on":
            lock_memory(arena)
        return cls(
            arena,
            Directory.create(
                layers=config.num_hidden_layers,
                experts=config.n_routed_experts,
                slots=plan.slots,
            ),
            Progress.create(words_count=Progress.COUNT),
            EarlyOrders.create(readers=options.readers),
            EngramRing.create(
                blocks=RING_BLOCKS,
                layers=len(config.engram_layer_ids),
                block_tokens=options.pass_tokens,
                rows=config.engram_rows_per_token,
                head_dim=config.engram_head_dim,
            ),
        )

    def close(self) -> None:
        """Drop this process's hold on all of it."""
        for region in (self.arena, self.directory, self.progress, self.early_orders, self.ring):
            region.close()


def lock_memory(arena: Arena) -> None:
    """Keep the arena's pages in memory while this process lives. Raises ResourceError.

    The pages are shared, so that one process's lock holds them for all.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = arena.data.ctypes.data, arena.data.nbytes
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
        raise ResourceError(
            f"--pin on: {format_size(size)} cannot be locked in memory "
            f"({os.strerror(ctypes.get_errno())}); raise the limit (ulimit -l unlimited) or use "
            "--pin off"
        )


@dataclass(frozen=True, slots=True)
class Wiring:
    """Start messages for one group. `files` are the shards in the order that read orders count."""

    config: ModelConfig
    options: GroupOptions
    runtime: RuntimeDirectory
    regions: Regions
    files: Sequence[Path]

    def reader(self, reader: int, incarnation: int) -> Launch:
        """How to start a reader. Raises ResourceError where it would find no one to talk to."""
        options, endpoints = self.options, self.runtime.endpoints
        if not Path(endpoints.control.removeprefix("ipc://")).exists():
            raise ResourceError(f"{self.runtime.path} was deleted or emptied while in use")
        spec = ReaderSpec(
            reader=reader,
            incarnation=incarnation,
            readers=options.readers,
            control=endpoints.control,
            orders=endpoints.readers,
            files=[str(path) for path in self.files],
            arena_fd=self.regions.arena.fd,
            early_orders_fd=self.regions.early_orders.fd,
            direct=options.direct,
            busy_poll=options.busy_poll_seconds,
            bandwidth=float(options.disk_bandwidth),
            latency=options.disk_latency,
            # A fault that ends a reader would end its replacement too.
            faults=options.reader_faults if incarnation == 0 else "",
            trace=self._trace(reader_name(reader)),
        )
        return "expert_io.reader", spec, (spec.arena_fd, spec.early_orders_fd)

    def services(self) -> dict[str, Launch]:
        """How to start everyone else, by process name."""
        return {
            "experts": self._experts(),
            "engram": self._engram(),
            "compute": self._compute(),
        }

    def _experts(self) -> Launch:
        options, regions, endpoints = self.options, self.regions, self.runtime.endpoints
        descriptors = (
            regions.arena.fd,
            regions.directory.fd,
            regions.progress.fd,
            regions.early_orders.fd,
        )
        spec = ExpertServiceSpec(
            control=endpoints.control,
            experts=endpoints.experts,
            readers_endpoint=endpoints.readers,
            checkpoint=str(options.checkpoint),
            pack=str(options.pack or ""),
            readers=options.readers,
            arena_fd=regions.arena.fd,
            directory_fd=regions.directory.fd,
            progress_fd=regions.progress.fd,
            early_orders_fd=regions.early_orders.fd,
            piece_bytes=options.piece_bytes,
            predicted_in_flight=options.predicted_in_flight,
            reserve=self.config.num_experts_per_tok,
            order_timeout=options.order_timeout,
            busy_poll=options.busy_poll_seconds,
            policy=options.policy,
            seed=options.seed,
            warm_experts=[],
            pinned=[layer << 16 | expert for layer, expert in options.pinned],
            warm_dir=str(options.warm_dir or ""),
            trace=self._trace("experts"),
        )
        return "expert_io.service", spec, descriptors

    def _engram(self) -> Launch:
        options, ring = self.options, self.regions.ring
        spec = EngramServiceSpec(
            control=self.runtime.endpoints.control,
            engram=self.runtime.endpoints.engram,
            checkpoint=str(options.checkpoint),
            ring_fd=ring.fd,
            threads=options.engram_reads,
            cache_bytes=options.engram_cache_bytes,
            direct=options.direct,
            busy_poll=options.busy_poll_seconds,
            latency=options.disk_latency,
            faults=options.engram_faults,
            trace=self._trace("engram"),
        )
        return "engram_io.service", spec, (ring.fd,)

    def _compute(self) -> Launch:
        options, regions, endpoints = self.options, self.regions, self.runtime.endpoints
        descriptors = (
            regions.arena.fd,
            regions.directory.fd,
            regions.progress.fd,
            regions.ring.fd,
        )
        spec = ComputeSpec(
            control=endpoints.control,
            experts=endpoints.experts,
            engram=endpoints.engram,
            checkpoint=str(options.checkpoint),
            device=options.device,
            arena_fd=regions.arena.fd,
            directory_fd=regions.directory.fd,
            progress_fd=regions.progress.fd,
            ring_fd=regions.ring.fd,
            chunk_tokens=options.pass_tokens,
            max_context=min(options.max_context, self.config.max_position_embeddings),
            kept_bytes=options.kept_bytes,
            snapshot_dir=str(options.snapshot_dir or "") if options.snapshot_bytes else "",
            snapshot_bytes=options.snapshot_bytes,
            # As many as a layer picks: what would come after those is rarely picked, and believed
            # less the more of it is seen. What nobody will read need not be foretold.
            predict=self.config.num_experts_per_tok if options.predicted_in_flight else 0,
            predict_ahead=options.predict_ahead,
            predict_early=options.predict_early,
            stall_timeout=options.stall_timeout,
            busy_poll=options.busy_poll_seconds,
            threads=options.threads,
            verify_slots=options.verify_slots,
            pin=options.pin != "off",
            graphs=options.graphs,
            device_cache_bytes=-1 if options.device_cache is None else options.device_cache,
            route_trace=str(options.route_trace.absolute()) if options.route_trace else "",
            route_trace_inputs=options.route_trace_inputs,
            trace=self._trace("compute"),
        )
        return "compute.process", spec, descriptors

    def _trace(self, name: str) -> str:
        return str(self.runtime.path / f"trace-0-{name}.jsonl") if self.options.trace else ""
