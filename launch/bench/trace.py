"""`headrace bench trace`: what tracing costs a token, on against off in alternating rounds."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from launch.bench.group import through_group
from launch.foreground import console, run_foreground, running_group
from launch.options import GenerateOptions, GroupOptions
from protocol.config import ModelConfig


def run(checkpoint: Path, tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    """Median of how much longer a traced token takes, as a share, and events written a token."""
    config = ModelConfig.load(checkpoint)
    every = config.num_hidden_layers * config.n_routed_experts + 2 * config.num_experts_per_tok
    options = GroupOptions(checkpoint, slots=every, threads=threads, kept_bytes=0)
    asked = GenerateOptions([config.bos_token_id, 3, 4, 5], max_tokens=tokens, ignore_eos=True)
    shares: list[float] = []
    events: list[int] = []

    async def main() -> None:
        async with running_group(options) as group:
            with tempfile.TemporaryDirectory(prefix="headrace-trace-") as directory:
                await through_group(group, asked)
                for number in range(1, rounds + 1):
                    _, before = await through_group(group, asked)
                    await group.trace_start()
                    _, traced = await through_group(group, asked)
                    events.append(await group.trace_stop(Path(directory) / "trace.json"))
                    _, after = await through_group(group, asked)
                    # Between its two neighbours, so that a machine that slows down counts for both.
                    shares.append((before + after) / 2 / traced - 1)
                    console.print(f"round {number} of {rounds}: {shares[-1]:+.1%} a token")

    run_foreground(main)
    return {
        "traced_cost": statistics.median(shares),
        "events_per_token": statistics.median(events) / tokens,
        "rounds": rounds,
    }
