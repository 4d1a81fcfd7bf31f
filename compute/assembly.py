"""A text generator put together from a checkpoint and the group's shared memory; the one place to
choose its parts. Owns nothing once that is done."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import zmq

from compute import arena_experts, ring_engram
from compute.arena_experts import ArenaExperts
from compute.device import open_device
from compute.generation import Limits, TextGenerator
from compute.interruption import Interruption
from compute.kept_states import KeptStates
from compute.kernels import chunk_kernels
from compute.layers.linear import product_dtype
from compute.model import Model
from compute.predictor import NO_FITTED_GATES, FittedGates
from compute.progress import ProgressPage
from compute.ring_engram import RingEngram
from compute.route_recorder import RouteRecorder
from compute.slot_views import slot_views
from compute.snapshots import Snapshots, identity_of
from compute.text import TokenBytes
from compute.warm_up import warm_up
from compute.weights import ModelWeights
from protocol import counters
from protocol.config import ModelConfig, require_file
from protocol.errors import CheckpointError, HeadraceError
from protocol.identity import PREDICTOR_NAME, checkpoint_identity
from protocol.layouts import ABSENT, Arena, Directory, EngramRing, Progress
from protocol.messages import Loading
from protocol.shards import Shards
from protocol.specs import ComputeSpec
from protocol.trace import Tracer
from protocol.transport import Channel

if TYPE_CHECKING:
    from compute.decode.assembly import AnyDecoder
    from compute.device_experts import DeviceExperts

#: The process's name on its sockets.
NAME = "compute"


class _Regions:
    """The group's shared memory, checked against the checkpoint and against each other."""

    def __init__(self, spec: ComputeSpec, config: ModelConfig) -> None:
        self.arena = Arena.attach(spec.arena_fd)
        self.directory = Directory.attach(spec.directory_fd)
        self.progress = Progress.attach(spec.progress_fd)
        self.ring = EngramRing.attach(spec.ring_fd)
        _expect(
            "directory (layers, experts, slots)",
            (self.directory.layers, self.directory.experts, self.directory.slots),
            (config.num_hidden_layers, config.n_routed_experts, self.arena.slots),
        )
        _expect(
            "engram ring (layers, rows, columns)",
            (self.ring.layers, self.ring.rows, self.ring.head_dim),
            (len(config.engram_layer_ids), config.engram_rows_per_token, config.engram_head_dim),
        )
        # One for the pass at hand, one for the next.
        _expect("engram ring of at least 2 blocks", self.ring.blocks >= 2, True)


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise HeadraceError(f"{what}: shared memory has {found}, the checkpoint needs {expected}")


def _load_weights(shards: Shards, device: torch.device, control: Channel) -> ModelWeights:
    def report(done: int, layers: int) -> None:
        what = f"dense weights, layer {done} of {layers}"
        control.send(Loading(NAME, what, done / layers))

    report(0, shards.config.num_hidden_layers)
    return ModelWeights.load(shards, device, report)


class Decoding(NamedTuple):
    decoder: AnyDecoder | None
    experts: DeviceExperts

    @property
    def way(self) -> str:
        """How the experts reach the device, in words."""
        return self.experts.way


class Assembled(NamedTuple):
    """What answers requests, what gives up every slot of the arena, and the facts to say of it."""

    generator: TextGenerator
    let_go: Callable[[], object]
    facts: dict[str, str]


def assemble(
    spec: ComputeSpec, context: zmq.Context[zmq.Socket[bytes]], control: Channel, tracer: Tracer
) -> Assembled:
    """A generator over the checkpoint and the group's shared memory; what takes long is said on
    `control`. Raises HeadraceError: the checkpoint, the device, or memory of another shape."""
    device = open_device(spec.device)
    checkpoint = Path(spec.checkpoint)
    config = ModelConfig.load(checkpoint)
    token_bytes = TokenBytes.load(checkpoint, [config.eos_token_id])
    weights = _load_weights(Shards.open(checkpoint, config), device, control)
    fitted = fitted_gates(checkpoint, weights)
    regions = _Regions(spec, config)
    progress = ProgressPage(regions.progress)
    views = slot_views(regions.arena, config, device, pin=spec.pin)
    interruption = Interruption()
    experts = ArenaExperts(
        Channel.connect(context, spec.experts, NAME, arena_experts.ACCEPTS),
        regions.directory,
        regions.arena,
        progress,
        views,
        tracer,
        stall_timeout=spec.stall_timeout,
        busy_poll=spec.busy_poll,
        verify_slots=spec.verify_slots,
        interruption=interruption,
    )
    engram = RingEngram(
        Channel.connect(context, spec.engram, NAME, ring_engram.ACCEPTS),
        regions.ring,
        progress,
        tracer,
        stall_timeout=spec.stall_timeout,
        busy_poll=spec.busy_poll,
        interruption=interruption,
    )
    limits = Limits(
        min(spec.chunk_tokens, engram.block_tokens),
        min(spec.max_context, config.max_position_embeddings),
    )
    store = _snapshots(spec, config, device, limits)
    routes = _route_recorder(spec, config, weights, fitted, experts, regions.arena.slots)
    if device.type == "cuda" and routes is None and spec.graphs == "token":
        control.send(Loading(NAME, "decode kernels, compiled at the first start", 1.0))
    decoding = _decoding(
        spec, config, weights, fitted, experts, engram, regions.arena, limits.context, tracer
    )
    if chunk_kernels(device) is not None:
        control.send(Loading(NAME, "prompt kernels, compiled at the first start", 1.0))
        warm_up(config, weights, limits.chunk_tokens)
    generator = TextGenerator(
        Model(
            config,
            weights,
            decoding.experts if decoding else experts,
            engram,
            tracer=tracer,
            predictions=spec.predict,
            ahead=spec.predict_ahead,
            early=spec.predict_early,
            routes=routes,
            fitted=fitted,
            decoder=decoding.decoder if decoding else None,
            capacity=limits.context if decoding else 0,
        ),
        engram,
        token_bytes,
        progress,
        tracer,
        KeptStates(spec.kept_bytes, store),
        limits,
        lambda: experts.counts | engram.counts | (decoding.experts.counts if decoding else {}),
        interruption,
    )
    threads = torch.get_num_threads()
    by_kernels = decoding is not None and decoding.decoder is not None
    facts = {
        "sequence states": f"{len(store)} kept on disk" if store is not None else "in memory only",
        "device": f"{device}, {threads} thread{'s' if threads > 1 else ''}",
        "products": str(product_dtype(device)).removeprefix("torch."),
        "dense weights": f"{weights.nbytes} bytes",
        "experts": views.way if decoding is None else f"{views.way}; {decoding.way}",
        "decode": f"kernels, graphs {spec.graphs}" if by_kernels else "torch operations",
        "prediction": "fitted gates" if fitted.gates else "the next layer's own gate",
        "context": f"{limits.context} tokens, prefill {limits.chunk_tokens} at a time",
    }
    return Assembled(generator, experts.let_go, facts)


def _decoding(
    spec: ComputeSpec,
    config: ModelConfig,
    weights: ModelWeights,
    fitted: FittedGates,
    experts: ArenaExperts,
    engram: RingEngram,
    arena: Arena,
    capacity: int,
    tracer: Tracer,
) -> Decoding | None:
    """On a GPU: decode steps through the kernels, where they are used, and the experts' tier in its
    memory."""
    if weights.embed.device.type != "cuda":
        return None
    from compute.decode.assembly import decoder, device_tier

    cache = None if spec.device_cache_bytes < 0 else spec.device_cache_bytes
    device = weights.embed.device
    tier = device_tier(experts, arena, config, device, cache, capacity, spec.chunk_tokens)
    if spec.route_trace:
        # A recorder is shown what only the torch path has at hand.
        return Decoding(None, tier)
    made = decoder(
        config,
        weights,
        tier,
        engram,
        graphs=spec.graphs,
        predictions=spec.predict,
        capacity=capacity,
        fitted=fitted,
        tracer=tracer,
    )
    return Decoding(made, tier)


def fitted_gates(checkpoint: Path, weights: ModelWeights) -> FittedGates:
    """Those beside the checkpoint; none where there are none, or they cannot be used."""
    path = checkpoint / PREDICTOR_NAME
    if not os.path.exists(path):
        return NO_FITTED_GATES
    try:
        require_file(path)
        gates = [layer.gate for layer in weights.layers]
        return FittedGates.load(path, gates, checkpoint_identity(checkpoint))
    except CheckpointError as error:
        print(f"{error}; the layers' own gates predict", file=sys.stderr, flush=True)
        return NO_FITTED_GATES


def _route_recorder(
    spec: ComputeSpec,
    config: ModelConfig,
    weights: ModelWeights,
    fitted: FittedGates,
    experts: ArenaExperts,
    slots: int,
) -> RouteRecorder | None:
    if not spec.route_trace:
        return None
    return RouteRecorder(
        Path(spec.route_trace),
        config,
        weights,
        fitted,
        identity=checkpoint_identity(Path(spec.checkpoint)),
        slots=slots,
        resident=lambda layer, picks: [word != ABSENT for word in experts.look_up(layer, picks)],
        stalled=lambda: experts.counts[counters.STALL_EXPERT_S],
        with_inputs=spec.route_trace_inputs,
    )


def _snapshots(
    spec: ComputeSpec, config: ModelConfig, device: torch.device, limits: Limits
) -> Snapshots | None:
    if not spec.snapshot_dir:
        return None
    # A state equals a fresh run's bit for bit only where it was computed in the same chunks.
    arithmetic = (device.type, product_dtype(device), torch.__version__, limits.chunk_tokens)
    identity = identity_of(Path(spec.checkpoint), *arithmetic)
    return Snapshots(Path(spec.snapshot_dir), spec.snapshot_bytes, identity, config)
