"""`headrace bench group`: tokens/s through the process group against the same model in one process.

Every expert is resident on both sides, so what differs is the group itself: shared memory instead
of tensors, messages, progress, prediction. Rounds alternate, tokens must agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compute.generation import Limits, TextGenerator
from compute.kept_states import KeptStates
from compute.model import Model
from compute.progress import ProgressPage
from compute.resident import ResidentExperts
from compute.text import TokenBytes
from compute.weights import ModelWeights
from engram_io.local import LocalEngramSource
from launch.foreground import console, run_foreground, running_group
from launch.group import ProcessGroup
from launch.options import GenerateOptions, GroupOptions
from protocol import counters
from protocol.config import ModelConfig
from protocol.errors import HeadraceError, failure
from protocol.layouts import Progress
from protocol.messages import Finished, Generate, TokenEvent
from protocol.shards import Shards
from protocol.trace import Tracer

PROMPT_TOKENS = 8


class TensorRows:
    """compute's EngramSource over rows read in this process."""

    def __init__(self, source: LocalEngramSource) -> None:
        self._source = source
        self.request = source.request
        self.done = source.done

    def here(self, ticket: int) -> bool:
        """As EngramSource."""
        return True

    def rows(self, ticket: int, engram_layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The source's arrays as tensors."""
        codes, scales = self._source.rows(ticket, engram_layer_index)
        return torch.from_numpy(codes), torch.from_numpy(scales)


class OneProcess:
    """The same generator with nothing beside it."""

    def __init__(self, checkpoint: Path, options: GroupOptions) -> None:
        config = ModelConfig.load(checkpoint)
        shards = Shards.open(checkpoint, config)
        device, tracer = torch.device("cpu"), Tracer("bench")
        weights = ModelWeights.load(shards, device)
        rows = TensorRows(LocalEngramSource.open(checkpoint))
        model = Model(config, weights, ResidentExperts.read(shards, device), rows, tracer=tracer)
        self._generator = TextGenerator(
            model,
            rows,
            TokenBytes.load(checkpoint, [config.eos_token_id]),
            ProgressPage(Progress.create(words_count=Progress.COUNT)),
            tracer,
            KeptStates(0),
            Limits(options.pass_tokens, options.max_context),
            dict,
        )

    def generate(self, request: Generate) -> tuple[list[int], float]:
        """Tokens and tokens/s of the decode."""
        tokens, finished = [], None
        for event in self._generator.run(request, lambda: False):
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
            elif isinstance(event, Finished):
                finished = event
        return tokens, _speed(finished)


async def through_group(group: ProcessGroup, options: GenerateOptions) -> tuple[list[int], float]:
    """Tokens and tokens/s of the decode of one request."""
    tokens, finished = [], None
    async for event in group.generate(options):
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
        elif isinstance(event, Finished):
            finished = event
    return tokens, _speed(finished)


def _speed(finished: Finished | None) -> float:
    if finished is None:
        raise HeadraceError("no answer")
    if finished.reason == "error":
        raise failure(finished.failure, finished.error)
    return finished.figures[counters.TOKENS_PER_S]


def _account(group: Sequence[float], alone: Sequence[float]) -> dict[str, Any]:
    return {
        "group_tokens_per_s": statistics.median(group),
        "one_process_tokens_per_s": statistics.median(alone),
        "ratio": statistics.median(a / b for a, b in zip(group, alone, strict=True)),
        "rounds": len(group),
    }


def run(checkpoint: Path, tokens: int, rounds: int, threads: int) -> dict[str, Any]:
    """Medians of both in tokens/s and of their ratio; raises HeadraceError where tokens differ."""
    config = ModelConfig.load(checkpoint)
    every = config.num_hidden_layers * config.n_routed_experts + 2 * config.num_experts_per_tok
    options = GroupOptions(checkpoint, device="cpu", slots=every, threads=threads, kept_bytes=0)
    prompt = [config.bos_token_id, *range(3, 3 + PROMPT_TOKENS)]
    asked = GenerateOptions(prompt, max_tokens=tokens, ignore_eos=True)
    torch.set_num_threads(threads)
    figures: dict[str, Any] = {}

    async def main() -> None:
        alone = OneProcess(checkpoint, options)
        async with running_group(options) as group:
            through: list[float] = []
            beside: list[float] = []
            for number in range(rounds + 1):
                request = asked.message(number)
                ours, speed = await through_group(group, asked)
                theirs, yardstick = alone.generate(request)
                if ours != theirs:
                    raise HeadraceError("the group and the one process chose different tokens")
                # The first round reads the experts in.
                if number:
                    through.append(speed)
                    beside.append(yardstick)
                    console.print(
                        f"round {number} of {rounds}: group {speed:.2f}, "
                        f"one process {yardstick:.2f} tokens/s"
                    )
            figures.update(_account(through, beside))

    run_foreground(main)
    return figures
