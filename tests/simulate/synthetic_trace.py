"""A small route trace with routing that is neither random nor constant."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from protocol.route_trace import Predictor, RouteTraceWriter, Step, TraceHeader

LAYERS, EXPERTS, TOP_K, WIDTH = 6, 32, 4, 8


def write_trace(path: Path, steps: int, *, right: float = 0.8, seed: int = 0) -> Path:
    """Topics change every 20 steps; the one predictor names each pick with chance `right`."""
    chance = random.Random(seed)
    predictors = (Predictor("gate", "moe", 1, 1 / 64),)
    header = TraceHeader("test", LAYERS, EXPERTS, TOP_K, 16, 40_000, 96, WIDTH, predictors)
    with RouteTraceWriter(path, header) as writer:
        for number in range(steps):
            topic = random.Random(number // 20 + 1000 * seed)
            liked = [topic.sample(range(EXPERTS), 10) for _ in range(LAYERS)]
            picks = np.array([[chance.sample(liked[layer], TOP_K)] for layer in range(LAYERS)])
            named = [_named(chance, row[0].tolist(), right) for row in picks]
            scores = np.array([[[score for _, score in row] for row in named]], np.float32)
            scores[0, 0] = np.nan
            writer.write(
                Step(
                    number,
                    number,
                    picks,
                    np.full(picks.shape, 0.25, np.float32),
                    np.zeros(picks.shape, np.bool_),
                    np.array([[[expert for expert, _ in row] for row in named]]),
                    scores,
                    np.full((LAYERS, 3), [0.006, 0.004, 0.0], np.float32),
                )
            )
    return path


def _named(chance: random.Random, picks: list[int], right: float) -> list[tuple[int, float]]:
    others = [expert for expert in range(EXPERTS) if expert not in picks]
    told = [expert for expert in picks if chance.random() < right]
    wrong = chance.sample(others, WIDTH - len(told))
    sure = [(expert, 0.2 + 0.2 * chance.random()) for expert in told]
    return sorted(
        [*sure, *((expert, 0.35 * chance.random() - 0.1) for expert in wrong)],
        key=lambda item: -item[1],
    )
