"""`headrace bench decode`: a token's time on a GPU against the time its bytes take to be read.

The caller is the compute process; the expert service and its readers are real. Experts are random,
so which ones a token picks is as good as drawn; what is missing is drawn too, before every token
and with a fixed seed. Of the routed experts as many lie in the arena and on the device as the
checkpoint has.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from compute.decode.arguments import Arguments
from compute.decode.assembly import AnyDecoder, decoder_over
from compute.decode.decoder import Decoder
from compute.decode.oracle import TokenOracle
from compute.decode.step import DecodeStep
from compute.decode.token import TokenDecoder
from compute.device import open_device
from compute.device_experts import DeviceExperts
from compute.sequence import SequenceState
from compute.weights import ModelWeights
from engram_io.local import LocalEngramSource
from launch.bench.device_rates import kernel_table
from launch.bench.expert_group import every_expert
from launch.bench.expert_tier import arena_experts, fill
from launch.bench.group import TensorRows
from launch.foreground import console
from protocol import counters
from protocol.config import ModelConfig
from protocol.shards import Shards

WARM_TOKENS = 4
DISK_TOKENS = 8  # a token that waits for the disk takes long
PREDICTIONS = 6
# A from_disk arena holds about what one layer has in hand, so nearly every miss is read.
SMALL_ARENA_LAYERS = 4


class RowsBefore:
    """An EngramSource whose rows are all there once they are asked for: reading them is another
    process's work, and not what is timed."""

    def __init__(self, source: TensorRows, config: ModelConfig) -> None:
        self._source = source
        self._layers = range(len(config.engram_layer_ids))
        self._read: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def request(self, start: int, tokens: Sequence[int], history: Sequence[int]) -> int:
        """Read them."""
        ticket = self._source.request(start, tokens, history)
        self._read[ticket] = [self._source.rows(ticket, at) for at in self._layers]
        return ticket

    def here(self, ticket: int) -> bool:
        """As EngramSource."""
        return True

    def rows(self, ticket: int, engram_layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As EngramSource."""
        return self._read[ticket][engram_layer_index]

    def done(self, ticket: int) -> None:
        """As EngramSource."""
        del self._read[ticket]
        self._source.done(ticket)


class DecodeBench:
    """One model on one device, and a sequence that grows by every token measured."""

    def __init__(
        self, checkpoint: Path, device: torch.device, modes: Sequence[str], capacity: int
    ) -> None:
        """`capacity` bounds the tokens of one measurement."""
        self.config = ModelConfig.load(checkpoint)
        self._checkpoint = checkpoint
        self._device = device
        shards = Shards.open(checkpoint, self.config)
        weights = ModelWeights.load(shards, device, stored=True)
        self.arguments = Arguments.of(weights, predict=True)
        self._rows = RowsBefore(TensorRows(LocalEngramSource.open(checkpoint)), self.config)
        predictions = min(PREDICTIONS, self.config.n_routed_experts)
        self._steps = {
            mode: DecodeStep(self.config, self.arguments, predictions=predictions) for mode in modes
        }
        # One for all, so that what is captured once stays as it is.
        self._state = SequenceState(self.config, device, capacity)
        self._empty = self._state.snapshot()
        self._spare = 2 * self.config.num_hidden_layers

    @property
    def on_gpu(self) -> bool:
        """Whether there are launches and kernels to look at."""
        return self._device.type == "cuda"

    @property
    def every(self) -> int:
        """How many routed experts the checkpoint has."""
        return self.config.num_hidden_layers * self.config.n_routed_experts

    @contextmanager
    def tier(self, arena_slots: int, readers: int) -> Iterator[DeviceExperts]:
        """Every expert on the device, over an arena of so many slots."""
        config = self.config
        with arena_experts(self._checkpoint, self._device, arena_slots, readers) as arena:
            # What is missing comes into slots of its own, so that nothing else has to go.
            tier = DeviceExperts(arena, config, self._device, self.every + self._spare)
            fill(tier, config)
            yield tier
            self._synchronize()

    def decoder(self, mode: str, tier: DeviceExperts) -> AnyDecoder:
        """Through the kernels, launched as `mode` says."""
        return decoder_over(self._steps[mode], tier, self._rows, graphs=mode)

    def compare(self, decoder: TokenOracle, tier: DeviceExperts, count: int, share: float) -> None:
        """Run `count` tokens all ways, a `share` of experts missing; `decoder` keeps the count."""
        for _ in self._run(decoder, tier, count, share, None):
            pass

    def tokens(
        self,
        decoder: Decoder | TokenDecoder,
        tier: DeviceExperts,
        count: int,
        share: float = 0.0,
        profiler: torch.profiler.profile | None = None,
    ) -> dict[str, float]:
        """Milliseconds a token and of them the host's own, medians, after some warm ones, with a
        `share` of experts missing from the device.

        `profiler` sees the last token.
        """
        totals, hosts, syncs = [], [], 0
        waited, waits = decoder.waited_s, decoder.waits
        for at, (forward, whole) in enumerate(
            self._run(decoder, tier, WARM_TOKENS + count, share, profiler)
        ):
            if at >= WARM_TOKENS:
                totals.append(1000 * whole)
                hosts.append(1000 * (forward - decoder.waited_s + waited))
            syncs = decoder.waits - waits + 1
            waited, waits = decoder.waited_s, decoder.waits
        return {
            "ms": statistics.median(totals),
            "host_ms": statistics.median(hosts),
            "syncs": syncs,
        }

    def _run(
        self,
        decoder: AnyDecoder,
        tier: DeviceExperts,
        count: int,
        share: float,
        profiler: torch.profiler.profile | None,
    ) -> Iterator[tuple[float, float]]:
        """Seconds of each token's `forward`, and until the device was done with it."""
        state, config = self._state, self.config
        state.restore(self._empty)
        chance = random.Random(1)
        history: list[int] = []
        every = every_expert(config)
        for at in range(count):
            token = chance.randrange(3, config.vocab_size)
            reach = config.engram_max_ngram_size - 1
            ticket = self._rows.request(at, [token], history[-reach:])
            hidden = tier.hide(key for key in every if chance.random() < share)
            self._synchronize()
            with profiler if profiler and at == count - 1 else nullcontext():
                begin = time.perf_counter()
                decoder.forward(token, state, ticket)
                forward = time.perf_counter()
                self._synchronize()
                end = time.perf_counter()
            self._rows.done(ticket)
            tier.show(hidden)
            history.append(token)
            yield forward - begin, end - begin

    def profile(
        self, decoder: Decoder | TokenDecoder, tier: DeviceExperts
    ) -> tuple[int, list[dict[str, Any]]]:
        """Launches the host makes for a token, and the device's time by kernel."""
        from torch.profiler import ProfilerActivity

        seen = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self.tokens(decoder, tier, 1, profiler=seen)
        launches = sum(
            any(call in event.name for call in ("Launch", "MemcpyAsync", "MemsetAsync"))
            for event in seen.events() or []
        )
        return launches, kernel_table(seen)

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def run(
    checkpoint: Path,
    device_name: str,
    modes: Sequence[str],
    tokens: int,
    share: float,
    readers: int,
) -> dict[str, Any]:
    """All figures; see docs/performance.md for what they mean. Raises HeadraceError."""
    device = open_device(device_name)
    bench = DecodeBench(checkpoint, device, modes, WARM_TOKENS + tokens)
    config = bench.config
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "missing_share": share,
        "tokens": tokens,
        "modes": {mode: {} for mode in modes},
    }
    with bench.tier(max(bench.every, 4 * config.num_experts_per_tok), readers) as tier:
        per_expert = tier.slot_bytes
        for mode in modes:
            of = figures["modes"][mode]
            decoder = bench.decoder(mode, tier)
            if isinstance(decoder, TokenOracle):
                bench.compare(decoder, tier, tokens, share)
                of |= {"compared": decoder.compared, "differences": decoder.differences}
                console.print(f"{mode}: {decoder.differences} differences in {tokens} tokens")
            else:
                of |= resident_figures(bench, decoder, tier, tokens, share)
                console.print(f"{mode}: {of['resident_ms']:.2f} ms a token, all resident")
        figures["copy_gb_s"] = copy_rate(tier, device)
    small = SMALL_ARENA_LAYERS * config.num_experts_per_tok
    with bench.tier(small, readers) as tier:
        for mode in modes:
            decoder = bench.decoder(mode, tier)
            if not isinstance(decoder, TokenOracle):
                timed = bench.tokens(decoder, tier, min(tokens, DISK_TOKENS), share)
                figures["modes"][mode]["from_disk_ms"] = timed["ms"]
    picked = config.num_hidden_layers * config.num_experts_per_tok * per_expert
    figures["bytes_per_token"] = bench.arguments.bytes_a_token + picked
    figures["hbm_gb_s"] = figures["floor_ms"] = None
    if bench.on_gpu:
        from compute.kernels.bandwidth import read_bandwidth

        figures["hbm_gb_s"] = read_bandwidth(device)
        figures["floor_ms"] = figures["bytes_per_token"] / figures["hbm_gb_s"] / 1e6
    return figures


def resident_figures(
    bench: DecodeBench,
    decoder: Decoder | TokenDecoder,
    tier: DeviceExperts,
    tokens: int,
    share: float,
) -> dict[str, Any]:
    """With every expert on the device, and with a `share` of them in the arena only."""
    timed = bench.tokens(decoder, tier, tokens)
    figures: dict[str, Any] = {"resident_ms": timed["ms"], "host_ms": timed["host_ms"]}
    figures |= {"syncs": timed["syncs"], "launches": None}
    if bench.on_gpu:
        figures["launches"], figures["kernels"] = bench.profile(decoder, tier)
    before = tier.counts[counters.DEVICE_COPIES]
    figures["from_arena_ms"] = bench.tokens(decoder, tier, tokens, share)["ms"]
    copied = tier.counts[counters.DEVICE_COPIES] - before
    figures["copies_per_token"] = copied / (tokens + WARM_TOKENS)
    return figures


def copy_rate(tier: DeviceExperts, device: torch.device) -> float | None:
    """GB/s of experts' bytes from pinned memory to the device; None on a CPU."""
    if device.type != "cuda":
        return None
    size = 16 * tier.slot_bytes
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    into = torch.empty(size, dtype=torch.uint8, device=device)
    into.copy_(host, non_blocking=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    into.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return size / milliseconds / 1e6
