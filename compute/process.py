"""The compute process: takes requests from the supervisor and answers them, one at a time.

Wires the model to its sources and its text generator to the control socket, and owns the queue of
requests. Started by the supervisor as `python -m protocol compute.process PIPE PARENT_PID`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import zmq

from compute import arena_experts, ring_engram
from compute.arena_experts import ArenaExperts
from compute.generation import Event, Limits, TextGenerator
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
from protocol.control import COMMON, ControlAnswers
from protocol.errors import CheckpointError, FailureKind, HeadraceError, UsageError
from protocol.identity import PREDICTOR_NAME, checkpoint_identity
from protocol.layouts import ABSENT, Arena, Directory, EngramRing, Progress
from protocol.lifecycle import run_child
from protocol.messages import Cancel, Finished, Generate, Hello, Loading, Ready
from protocol.shards import Shards
from protocol.specs import ComputeSpec
from protocol.trace import Tracer
from protocol.transport import Channel
from protocol.wire import Message

if TYPE_CHECKING:
    from compute.decode.assembly import AnyDecoder
    from compute.device_experts import DeviceExperts

NAME = "compute"
CONTROL = (Generate, Cancel, *COMMON)
# Requests that wait beside the one at hand; who queues people's requests is the supervisor.
QUEUED_REQUESTS = 8
IDLE_WAKE_S = 0.1
# How long a full queue of events is left alone before the next try.
DELIVERY_PAUSE_S = 0.005


class ComputeProcess:
    """Owns the control socket's side of requests for the life of the process."""

    def __init__(
        self,
        control: Channel,
        generator: TextGenerator,
        tracer: Tracer,
        let_go: Callable[[], object],
    ) -> None:
        """`let_go` gives up every slot of the arena, once the device has read it."""
        self._control = control
        self._let_go = let_go
        self._generator = generator
        self._progress = generator.progress
        self._tracer = tracer
        self._answers = ControlAnswers(control, NAME, tracer, self._figures, self._stop)
        self._queue: deque[Generate] = deque()
        self._current: int | None = None
        self._cancelled = False
        self._stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        while not self._stopping:
            if not self._queue:
                received = self._control.receive(IDLE_WAKE_S)
                # Idle it holds no slot, whatever the service takes out in the meantime.
                self._let_go()
                self._progress.beat()
                if received is not None:
                    self._take(received[1])
                continue
            self._answer(self._queue.popleft())
        self._tracer.stop()
        self._generator.kept.close()

    def _answer(self, request: Generate) -> None:
        self._current, self._cancelled = request.request, False
        for event in self._generator.run(request, self._is_cancelled, self._control.send):
            self._deliver(event)
        self._current = None

    def _is_cancelled(self) -> bool:
        """Take in what has come; whether the request at hand is to end."""
        for _, message in self._control.drain():
            self._take(message)
        return self._cancelled or self._stopping

    def _deliver(self, event: Event) -> None:
        """Send, waiting while the supervisor's queue is full: one that is stopped stops us too, and
        one that is gone ends this process."""
        while not self._control.send(event):
            self._progress.beat()
            time.sleep(DELIVERY_PAUSE_S)

    def _take(self, message: Message) -> None:
        match message:
            case Generate():
                self._enqueue(message)
            case Cancel(request):
                self._cancel(request)
            case _:
                self._answers.take(message)

    def _enqueue(self, request: Generate) -> None:
        if len(self._queue) < QUEUED_REQUESTS:
            self._queue.append(request)
        else:
            error = f"{QUEUED_REQUESTS} requests wait already; try again later"
            self._deliver(_unstarted(request, "error", error, "resource"))

    def _cancel(self, request: int) -> None:
        if request == self._current:
            self._cancelled = True
        for waiting in [waiting for waiting in self._queue if waiting.request == request]:
            self._queue.remove(waiting)
            self._deliver(_unstarted(waiting, "cancelled"))

    def _stop(self) -> None:
        self._stopping = True

    def _figures(self) -> dict[str, float]:
        return {
            **self._generator.counts(),
            counters.STEPS: float(self._generator.steps),
            counters.MALFORMED_MESSAGES: float(self._control.malformed),
        }


def _unstarted(request: Generate, reason: str, error: str = "", kind: FailureKind = "") -> Finished:
    return Finished(request.request, reason, "", error, kind, len(request.prompt), 0, 0, {})


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


def open_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"device {name!r} cannot be used, expected cpu or cuda")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {name!r} cannot be used ({reason}); try --device cpu") from None
    return device


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


def _assemble(
    spec: ComputeSpec, context: zmq.Context[zmq.Socket[bytes]], control: Channel, tracer: Tracer
) -> tuple[TextGenerator, Callable[[], object], dict[str, str]]:
    """A generator over the checkpoint and the group's shared memory, what lets its slots go, and
    the facts about it."""
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
        verify_slots=spec.verify_slots,
        interruption=interruption,
    )
    engram = RingEngram(
        Channel.connect(context, spec.engram, NAME, ring_engram.ACCEPTS),
        regions.ring,
        progress,
        tracer,
        stall_timeout=spec.stall_timeout,
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
    decoding = _decoding(spec, config, weights, fitted, experts, engram, regions.arena, tracer)
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
    return generator, experts.let_go, facts


def _decoding(
    spec: ComputeSpec,
    config: ModelConfig,
    weights: ModelWeights,
    fitted: FittedGates,
    experts: ArenaExperts,
    engram: RingEngram,
    arena: Arena,
    tracer: Tracer,
) -> Decoding | None:
    """On a GPU: decode steps through the kernels, where they are used, and the experts' tier in its
    memory."""
    if weights.embed.device.type != "cuda":
        return None
    from compute.decode.assembly import decoder, device_tier

    cache = None if spec.device_cache_bytes < 0 else spec.device_cache_bytes
    device = weights.embed.device
    room = (spec.max_context, spec.chunk_tokens)
    tier = device_tier(experts, arena, config, device, cache, *room)
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


def serve(spec: ComputeSpec) -> None:
    """The process's whole life."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control = Channel.connect(context, spec.control, NAME, CONTROL)
    control.send(Hello(NAME, os.getpid(), 0))
    if spec.threads > 0:
        torch.set_num_threads(spec.threads)
    tracer = Tracer(NAME, spec.trace)
    generator, let_go, facts = _assemble(spec, context, control, tracer)
    control.send(Ready(NAME, facts))
    ComputeProcess(control, generator, tracer, let_go).run()


if __name__ == "__main__":
    run_child(ComputeSpec, serve)
