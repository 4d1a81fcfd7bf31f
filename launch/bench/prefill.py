"""`headrace bench prefill`: a prompt's first pass against the time its bytes and operations take.

The caller is the compute process; the expert service and its readers are real. Prompts are random
tokens with a fixed seed, cut into the engine's chunks; every pass starts from an empty sequence.
Engram rows are there before a pass begins: reading them is another process's work.
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

from compute.device import open_device
from compute.device_experts import DeviceExperts, HoldingSource
from compute.model import Model
from compute.weights import ModelWeights
from engram_io.local import LocalEngramSource
from launch.bench.decode import RowsBefore, copy_rate
from launch.bench.device_rates import kernel_table, product_rate, read_rate, synchronize
from launch.bench.expert_group import every_expert
from launch.bench.expert_tier import arena_experts, fill
from launch.bench.group import TensorRows
from launch.bench.prefill_work import by_part, floor_seconds, prefill_work, total
from launch.foreground import console
from launch.options import GroupOptions
from protocol.config import ModelConfig
from protocol.errors import UsageError
from protocol.shards import Shards

# After so many seconds of timed passes no further one begins.
ENOUGH_S = 5.0
GPU_TOKENS, CPU_TOKENS = (128, 1024, 8192), (32, 128)
# A pass that takes longer says so.
TALK_AFTER_S = 2.0


class NotingTier(DeviceExperts):
    """A tier that keeps account of which experts were picked."""

    def __init__(
        self, arena: HoldingSource, config: ModelConfig, device: torch.device, slots: int
    ) -> None:
        super().__init__(arena, config, device, slots)
        self.picked: list[set[int]] = [set() for _ in range(config.num_hidden_layers)]

    def hint(
        self,
        layer: int,
        picks: Sequence[int],
        predicted_layer: int | None,
        predicted: Sequence[int],
        scores: Sequence[float],
    ) -> None:
        self.picked[layer].update(picks)
        super().hint(layer, picks, predicted_layer, predicted, scores)


def chunk_ends(tokens: int, chunk_tokens: int) -> list[int]:
    """Where the passes over a prompt end, as the engine cuts a fresh one."""
    return [*range(chunk_tokens, tokens, chunk_tokens), tokens]


class PrefillBench:
    """One model with every expert on its device and in the arena, and prompts to run it on."""

    def __init__(
        self,
        model: Model,
        rows: RowsBefore,
        tier: NotingTier,
        chunk_tokens: int,
        passes: int,
    ) -> None:
        self._model = model
        self._config = model.config
        self._device = model.device
        self._rows = rows
        self._tier = tier
        self._chunk_tokens = chunk_tokens
        self._passes = passes

    def figures(self, tokens: int, rates: tuple[float, float]) -> dict[str, Any]:
        """A prompt's figures; `rates` are bytes/s and operations/s."""
        tier = self._tier
        prompt = self._prompt(tokens)
        for picked in tier.picked:
            picked.clear()
        resident, peak = self._timed(prompt, "on the device")
        distinct = [len(picked) for picked in tier.picked]
        hidden = tier.hide(every_expert(self._config))
        from_arena, _ = self._timed(prompt, "in the arena")
        tier.show(hidden)
        work = prefill_work(self._config, tokens, distinct)
        parts, floor = by_part(work), floor_seconds(work, *rates)
        needed = total(parts.values())
        return {
            "tokens": tokens,
            "chunks": len(chunk_ends(tokens, self._chunk_tokens)),
            "experts": sum(distinct),
            "bytes": needed.nbytes,
            "flops": needed.flops,
            "floor_ms": 1000 * floor,
            "resident_ms": 1000 * resident,
            "resident_tokens_per_s": tokens / resident,
            "ratio": resident / floor,
            "from_arena_ms": 1000 * from_arena,
            "peak_bytes": peak,
            "parts": {
                name: {"bytes": part.nbytes, "flops": part.flops} for name, part in parts.items()
            },
            **self._profiled(prompt),
        }

    def _prompt(self, tokens: int) -> list[int]:
        chance = random.Random(1)
        return [chance.randrange(3, self._config.vocab_size) for _ in range(tokens)]

    def _timed(self, prompt: list[int], where: str) -> tuple[float, int | None]:
        """Median seconds of a prefill after a warm one, its experts lying `where`; and the most
        device memory it took beyond what lay there before."""
        seconds: list[float] = []
        on_gpu, peak = self._device.type == "cuda", 0
        for at in range(1 + self._passes):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self._device)
                before = torch.cuda.memory_allocated(self._device)
            seconds.append(self._prefill(prompt))
            if on_gpu:
                peak = max(peak, torch.cuda.max_memory_allocated(self._device) - before)
            if seconds[-1] > TALK_AFTER_S:
                which = f"pass {at} of {self._passes}" if at else "warming up"
                console.print(
                    f"{len(prompt)} tokens, experts {where}, {which}: {seconds[-1]:.1f} s"
                )
            if at and sum(seconds[1:]) > ENOUGH_S:
                break
        return statistics.median(seconds[1:]), peak if on_gpu else None

    def _prefill(self, prompt: list[int], profiler: torch.profiler.profile | None = None) -> float:
        """Seconds from an empty sequence until the device has the last token's logits."""
        reach = self._config.engram_max_ngram_size - 1
        ends = chunk_ends(len(prompt), self._chunk_tokens)
        spans = list(zip([0, *ends], ends, strict=False))
        tickets = [
            self._rows.request(start, prompt[start:end], prompt[max(0, start - reach) : start])
            for start, end in spans
        ]
        synchronize(self._device)
        with profiler or nullcontext():
            begin = time.perf_counter()
            state = self._model.new_state()
            for (start, end), ticket in zip(spans, tickets, strict=True):
                self._model.forward(prompt[start:end], state, ticket)
            synchronize(self._device)
            return time.perf_counter() - begin

    def _profiled(self, prompt: list[int]) -> dict[str, Any]:
        """`device_ms`, the sum of a prefill's kernels, and those by time; none on a CPU."""
        if self._device.type != "cuda":
            return {"device_ms": None, "kernels": []}
        activities = [torch.profiler.ProfilerActivity.CUDA]
        seen = torch.profiler.profile(activities=activities, acc_events=True)
        self._prefill(prompt, seen)
        rows = kernel_table(seen)
        return {"device_ms": sum(row["us"] for row in rows) / 1000, "kernels": rows}


def run(
    checkpoint: Path,
    device_name: str,
    lengths: Sequence[int],
    chunk_tokens: int | None,
    passes: int,
    readers: int,
) -> dict[str, Any]:
    """All figures; `lengths` may be empty. Raises HeadraceError."""
    device = open_device(device_name)
    chunk_tokens = GroupOptions(checkpoint, device.type, chunk_tokens=chunk_tokens).pass_tokens
    config = ModelConfig.load(checkpoint)
    chosen = lengths or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS)
    for tokens in chosen:
        if tokens > config.max_position_embeddings:
            raise UsageError(
                f"--tokens {tokens} is more than the model's limit of "
                f"{config.max_position_embeddings}"
            )
    console.print("measuring the device")
    rates = read_rate(device), product_rate(device)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "chunk_tokens": chunk_tokens,
        "passes": passes,
        "hbm_gb_s": rates[0] / 1e9,
        "tflops": rates[1] / 1e12,
        "prompts": [],
    }
    with _resident(checkpoint, device, max(chosen), readers) as (model, rows, tier):
        figures["copy_gb_s"] = copy_rate(tier, device)
        bench = PrefillBench(model, rows, tier, chunk_tokens, passes)
        for tokens in chosen:
            of = bench.figures(tokens, rates)
            figures["prompts"].append(of)
            console.print(f"{tokens} tokens: {of['resident_ms']:.1f} ms all on the device")
    return figures


@contextmanager
def _resident(
    checkpoint: Path, device: torch.device, longest: int, readers: int
) -> Iterator[tuple[Model, RowsBefore, NotingTier]]:
    """A model with every expert on the device, over an arena that holds every one, too."""
    config = ModelConfig.load(checkpoint)
    console.print("loading the dense weights")
    weights = ModelWeights.load(Shards.open(checkpoint, config), device)
    rows = RowsBefore(TensorRows(LocalEngramSource.open(checkpoint)), config)
    every = config.num_hidden_layers * config.n_routed_experts
    # What the service keeps free, and what it may have in hand, on top.
    slots = every + 2 * config.num_experts_per_tok
    with arena_experts(checkpoint, device, slots, readers) as arena:
        tier = NotingTier(arena, config, device, slots)
        console.print(f"reading {every} experts")
        fill(tier, config)
        model = Model(config, weights, tier, rows, capacity=longest)
        yield model, rows, tier
        synchronize(device)
