"""A decoder put together from what the compute process has; the one place to choose its parts."""

from __future__ import annotations

import math

import torch

from compute.decode.arguments import Arguments
from compute.decode.decoder import Decoder
from compute.decode.graphs import Eager, Graphs, OneGraph
from compute.decode.oracle import Oracle, TokenOracle
from compute.decode.step import DecodeStep
from compute.decode.token import TokenDecoder
from compute.device_experts import DeviceExperts, HoldingSource
from compute.predictor import NO_FITTED_GATES, FittedGates
from compute.sequence import SequenceState
from compute.slot_views import tensor_shapes
from compute.sources import EngramSource, Tracer
from compute.weights import ModelWeights
from protocol.config import ModelConfig
from protocol.errors import UsageError
from protocol.layouts import Arena
from protocol.specs import GRAPHS

#: Anything that runs single tokens.
AnyDecoder = Decoder | TokenDecoder | TokenOracle
# Device memory left besides, for what the allocator cannot use and for others' use of the device.
RESERVE_BYTES = 2 << 30
RESERVE_SHARE = 0.05
# The arena alone serves where a copy from it runs at this share of a copy inside the device.
IN_PLACE_SHARE = 0.5
_PROBE_BYTES = 256 << 20


def decoder(
    config: ModelConfig,
    weights: ModelWeights,
    experts: DeviceExperts,
    engram: EngramSource,
    *,
    graphs: str,
    predictions: int,
    capacity: int = 0,
    fitted: FittedGates = NO_FITTED_GATES,
    tracer: Tracer | None = None,
) -> AnyDecoder:
    """What runs tokens as `graphs`, one of GRAPHS, says; a token as one graph with its kernels
    compiled for sequences with room for `capacity` tokens.

    Raises UsageError for graphs on a device without them.
    """
    arguments = Arguments.of(weights, fitted, predict=predictions > 0)
    step = DecodeStep(config, arguments, predictions=min(predictions, config.n_routed_experts))
    made = decoder_over(step, experts, engram, graphs=graphs, tracer=tracer)
    if isinstance(made, TokenDecoder):
        made.compile(capacity)
    return made


def decoder_over(
    step: DecodeStep,
    experts: DeviceExperts,
    engram: EngramSource,
    *,
    graphs: str,
    tracer: Tracer | None = None,
) -> AnyDecoder:
    """As `decoder`, over a step that is there already."""
    device = step.buffers.streams.device
    if graphs not in GRAPHS:
        raise UsageError(f"--graphs is {graphs!r}, expected {', '.join(GRAPHS)}")
    if graphs == "off":
        return Decoder(step, Eager(), experts, engram, tracer=tracer)
    if device.type != "cuda":
        raise UsageError(f"--graphs {graphs} needs a GPU, not {device}; leave it out or say off")
    if graphs == "on":
        return Decoder(step, Graphs(device, step.baked), experts, engram, tracer=tracer)
    eager = Decoder(step, Eager(), experts, engram, tracer=tracer)
    token = TokenDecoder(eager, experts, OneGraph(Graphs(device, step.baked)), tracer=tracer)
    if graphs == "token":
        return token
    oracle = Oracle(step, Graphs(device, step.baked))
    return TokenOracle(token, Decoder(step, oracle, experts, engram, tracer=tracer), oracle)


def device_tier(
    source: HoldingSource,
    arena: Arena,
    config: ModelConfig,
    device: torch.device,
    cache_bytes: int | None,
    context: int,
    chunk_tokens: int,
) -> DeviceExperts:
    """Expert slots in `cache_bytes` of device memory; None: in what is left beside two sequences of
    `context` tokens and a prompt's pass over `chunk_tokens`, or none where the device reads the
    arena about as fast as its own memory. With 0 the arena alone serves. Raises UsageError where
    too little is left."""
    slot = sum(math.prod(shape) for shape in tensor_shapes(config))
    least = 2 * config.num_experts_per_tok
    every = config.num_hidden_layers * config.n_routed_experts
    if cache_bytes == 0 or (cache_bytes is None and reads_in_place(arena, device)):
        return DeviceExperts(source, config, device, least, in_place=True)
    if cache_bytes is None:
        free, total = torch.cuda.mem_get_info(device)
        states = 2 * SequenceState.bytes_for(config, context)
        passing = chunk_bytes(config, min(chunk_tokens, context))
        cache_bytes = free - states - passing - max(RESERVE_BYTES, int(total * RESERVE_SHARE))
    slots = min(cache_bytes // slot, max(every, least))
    if slots < least:
        raise UsageError(
            f"device memory holds {max(slots, 0)} experts of {slot} bytes, expected at least "
            f"{least}; ask for a shorter --max-context, or --device-cache 0 to read them in place"
        )
    return DeviceExperts(source, config, device, slots)


def chunk_bytes(config: ModelConfig, tokens: int) -> int:
    """Device memory that a pass over so many tokens takes at its peak beyond weights and state.

    bf16 everywhere: queries and attended heads, each twice on the way; the streams twice; and a
    vector for each pick, going in and coming out. 0.47 MB a token at the released widths, as
    measured.
    """
    heads = 4 * config.num_attention_heads * config.head_dim
    streams = 2 * config.hc_mult * config.hidden_size
    picks = 2 * config.num_experts_per_tok * config.hidden_size
    return 2 * tokens * (heads + streams + picks)


def reads_in_place(arena: Arena, device: torch.device) -> bool:
    """Whether `device` reads the arena about as fast as its own memory, by two timed copies."""
    size = min(_PROBE_BYTES, arena.data.nbytes)
    host = torch.from_numpy(arena.data).view(-1)[:size]
    into, other = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = [_copy_seconds(source, into) for source in (host, other)]
    return seconds[1] >= IN_PLACE_SHARE * seconds[0]


def _copy_seconds(source: torch.Tensor, into: torch.Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    into.copy_(source, non_blocking=True)
    begin.record()
    into.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000
