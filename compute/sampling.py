"""Which token comes next: penalties, temperature, top-k, top-p, min-p, and log-probabilities.

Owns the random numbers of one request. Promises: the same logits and the same parameters give the
same tokens, on every device and whatever is cached, because everything here is computed on the CPU
with the request's own generator; equal scores are ordered by the lower id.

The order is fixed: penalties, temperature, then top-k, then top-p over what top-k left, then min-p.
Reported log-probabilities are the model's own (temperature 1, before penalties), natural logarithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from protocol.errors import HeadraceError, UsageError
from protocol.messages import MAX_LOGPROBS

Scores = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

# Where top-p starts to look; it grows until the nucleus is inside, so this is only about speed.
_FIRST_CANDIDATES = 512


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The defaults change nothing: greedy would be `temperature` 0.

    `top_k` 0, `top_p` 1, `min_p` 0 and penalties 0 are off. `logprobs` is how many alternatives to
    report with each token, None for no log-probabilities at all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None

    def check(self) -> None:
        """Raises UsageError naming the first value out of its range."""
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("top_k", 0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("frequency_penalty", -2.0, 2.0),
            ("presence_penalty", -2.0, 2.0),
            ("logprobs", 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                raise UsageError(f"{name} is {value}, expected {low} to {high}")
        if self.top_p == 0.0:
            raise UsageError(
                "top_p is 0, expected more than 0; for the likeliest token alone use temperature 0"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """One chosen token; `logprob` None where log-probabilities were not asked for."""

    token: int
    logprob: float | None
    top_ids: list[int]
    top_logprobs: list[float]


class Sampler:
    """Draws one request's tokens in order; it remembers them for the penalties."""

    def __init__(self, params: SamplingParams) -> None:
        """Raises UsageError where `params` are out of range."""
        params.check()
        self.params = params
        self._counts: dict[int, int] = {}
        self._generator = torch.Generator(device="cpu").manual_seed(params.seed)

    def sample(self, logits: torch.Tensor) -> Sample:
        """The next token from `logits`, float [vocab], on any device.

        Raises HeadraceError where the largest logit is not a finite number.
        """
        scores: Scores = logits.detach().to("cpu", torch.float32).numpy()
        token = self._choose(self._penalized(scores))
        self._counts[token] = self._counts.get(token, 0) + 1
        if self.params.logprobs is None:
            return Sample(token, None, [], [])
        normalizer = _log_sum_exp(scores)
        top = largest(scores, self.params.logprobs)
        return Sample(
            token,
            float(scores[token]) - normalizer,
            top.tolist(),
            [float(scores[i]) - normalizer for i in top],
        )

    def _penalized(self, scores: Scores) -> Scores:
        params = self.params
        if not self._counts or not (params.frequency_penalty or params.presence_penalty):
            return scores
        penalized = scores.copy()
        ids = np.fromiter(self._counts, np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        penalized[ids] -= params.presence_penalty + params.frequency_penalty * counts
        return penalized

    def _choose(self, scores: Scores) -> int:
        # numpy promises the first of equal maxima, torch does not.
        likeliest = int(scores.argmax())
        if not math.isfinite(scores[likeliest]):
            raise HeadraceError(
                f"the model's logit of token {likeliest} is {scores[likeliest]}, expected a finite "
                "number; check the checkpoint with: headrace check DIR"
            )
        if self.params.temperature == 0.0:
            return likeliest
        weights = np.exp(
            (scores.astype(np.float64) - float(scores[likeliest])) / self.params.temperature
        )
        ids = self._candidates(scores, weights)
        kept = weights if ids is None else weights[ids]
        cumulative = np.cumsum(kept)
        point = torch.rand(1, generator=self._generator, dtype=torch.float64).item()
        drawn = int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))
        drawn = min(drawn, len(kept) - 1)
        return drawn if ids is None else int(ids[drawn])

    def _candidates(self, scores: Scores, weights: npt.NDArray[np.float64]) -> Ids | None:
        """What top-k, top-p and min-p leave, likeliest first; None for every id.

        `weights` are relative to the likeliest token's 1.
        """
        params = self.params
        ids: Ids | None = None
        if 0 < params.top_k < len(scores):
            ids = largest(scores, params.top_k)
        if params.top_p < 1.0:
            ids = _nucleus(scores, weights, ids, params.top_p)
        if params.min_p > 0.0:
            if ids is None:
                ids = np.arange(len(scores))
            ids = ids[weights[ids] >= params.min_p]
        return ids


def largest(scores: Scores, count: int) -> Ids:
    """Ids of the `count` largest of `scores` [n], largest first, of equals the lower id first."""
    if count <= 0:
        return np.empty(0, np.int64)
    if count >= len(scores):
        return np.argsort(-scores, kind="stable")
    cut = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > cut)
    level = np.flatnonzero(scores == cut)[: count - len(above)]
    ids = np.concatenate([above, level])
    return ids[np.argsort(-scores[ids], kind="stable")]


def _nucleus(
    scores: Scores, weights: npt.NDArray[np.float64], ids: Ids | None, top_p: float
) -> Ids:
    """The fewest likeliest ids whose weights reach `top_p` of the total, all or those of `ids`."""
    if ids is not None:
        return ids[: _reaching(weights[ids], top_p * float(weights[ids].sum()))]
    wanted = top_p * float(weights.sum())
    count = _FIRST_CANDIDATES
    while True:
        ids = largest(scores, count)
        if count >= len(scores) or float(weights[ids].sum()) >= wanted:
            return ids[: _reaching(weights[ids], wanted)]
        count *= 8


def _reaching(weights: npt.NDArray[np.float64], wanted: float) -> int:
    """How many of `weights` [n] from the front sum up to `wanted`: at least 1, at most n."""
    return min(int(np.searchsorted(np.cumsum(weights), wanted)) + 1, len(weights))


def _log_sum_exp(scores: Scores) -> float:
    highest = float(scores.max())
    return highest + math.log(float(np.exp(scores.astype(np.float64) - highest).sum()))
