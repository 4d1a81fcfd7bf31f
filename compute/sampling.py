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
Weights = npt.NDArray[np.floating]
Ids = npt.NDArray[np.int64]

# Where top-p starts to look; it grows until the nucleus is inside, so this is only about speed.
_FIRST_CANDIDATES = 512
# A cumulative sum is slow over a vocabulary, so it is made over blocks of so many ids and then
# within one.
_BLOCK = 256
# Logits are fp32, so what differs at all is beyond the draw's reach at this temperature.
_LEAST_TEMPERATURE = 1e-20


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
        self._host: torch.Tensor | None = None

    def sample(self, logits: torch.Tensor) -> Sample:
        """The next token from `logits`, float [vocab], on any device.

        Raises HeadraceError where the largest logit is not a finite number.
        """
        scores = self._on_host(logits.detach())
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

    def _on_host(self, logits: torch.Tensor) -> Scores:
        """fp32 `logits`; a device's are overwritten by the next call."""
        if not logits.is_cuda:
            return logits.to("cpu", torch.float32).numpy()
        # Into pinned memory: a copy of a vocabulary into other memory takes longer than drawing.
        if self._host is None or self._host.shape != logits.shape:
            self._host = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
        self._host.copy_(logits)
        return self._host.numpy()

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
        temperature = max(self.params.temperature, _LEAST_TEMPERATURE)
        point = torch.rand(1, generator=self._generator, dtype=torch.float64).item()
        highest = scores[likeliest]
        ids = self._candidates(scores, highest, temperature)
        if ids is None:
            return _drawn_of_many(_relative(scores, highest, temperature), point)
        kept = _relative(scores[ids].astype(np.float64), highest, temperature)
        return int(ids[_drawn(kept, point)])

    def _candidates(self, scores: Scores, highest: np.float32, temperature: float) -> Ids | None:
        """What top-k, top-p and min-p leave, likeliest first; None for every id."""
        params = self.params
        ids: Ids | None = None
        if 0 < params.top_k < len(scores):
            ids = largest(scores, params.top_k)
        if params.top_p < 1.0:
            ids = _nucleus(scores, ids, params.top_p, highest, temperature)
        if params.min_p > 0.0:
            if ids is None:
                # Those and a few more, of which the exact weight decides.
                ids = np.flatnonzero(_relative(scores, highest, temperature) >= 0.99 * params.min_p)
            weights = _relative(scores[ids].astype(np.float64), highest, temperature)
            ids = ids[weights >= params.min_p]
        return ids


def _relative(scores: Weights, highest: np.float32, temperature: float) -> Weights:
    """Weights of `scores` in their own precision, the one of `highest` being 1."""
    with np.errstate(over="ignore"):
        return np.exp((scores - highest) / scores.dtype.type(temperature))


def _drawn(weights: Weights, point: float) -> int:
    """The index at which the share `point` of all `weights` [n] is reached."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    at = int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))
    return min(at, len(weights) - 1)


def _drawn_of_many(weights: Weights, point: float) -> int:
    """As `_drawn`, in two steps."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)).astype(np.float64)
    block = _drawn(sums, point)
    within = (point * float(sums.sum()) - float(sums[:block].sum())) / float(sums[block])
    first = block * _BLOCK
    return first + _drawn(weights[first : first + _BLOCK], min(max(within, 0.0), 1.0))


def largest(scores: Scores, count: int) -> Ids:
    """Ids of the `count` largest of `scores` [n], largest first, of equals the lower id first."""
    if count <= 0:
        return np.empty(0, np.int64)
    if count >= len(scores):
        return np.argsort(-scores, kind="stable")
    ids = np.flatnonzero(scores >= _below_largest(scores, count))
    return ids[np.argsort(-scores[ids], kind="stable")][:count]


def _below_largest(scores: Scores, count: int) -> float:
    """A value that at least `count` of `scores` [n] reach, and few more than that.

    Of disjoint sets' greatest elements, the `count`-th: that many elements are no smaller. Much
    sooner found than the `count`-th of all.
    """
    members = len(scores) // (8 * count)
    if members < 2:
        return float(np.partition(scores, len(scores) - count)[len(scores) - count])
    sets = len(scores) // members
    tops = scores[: members * sets].reshape(members, sets).max(axis=0)
    return float(np.partition(tops, sets - count)[sets - count])


def _nucleus(
    scores: Scores, ids: Ids | None, top_p: float, highest: np.float32, temperature: float
) -> Ids:
    """The fewest likeliest ids whose weights reach `top_p` of the total, all or those of `ids`."""

    def weights(ids: Ids) -> Weights:
        return _relative(scores[ids].astype(np.float64), highest, temperature)

    if ids is not None:
        of_all = weights(ids)
        return ids[: _reaching(of_all, top_p * float(of_all.sum()))]
    wanted = top_p * float(_relative(scores, highest, temperature).sum(dtype=np.float64))
    count = _FIRST_CANDIDATES
    while True:
        ids = largest(scores, count)
        kept = weights(ids)
        if count >= len(scores) or float(kept.sum()) >= wanted:
            return ids[: _reaching(kept, wanted)]
        count *= 8


def _reaching(weights: Weights, wanted: float) -> int:
    """How many of `weights` [n] from the front sum up to `wanted`: at least 1, at most n."""
    return min(int(np.searchsorted(np.cumsum(weights), wanted)) + 1, len(weights))


def _log_sum_exp(scores: Scores) -> float:
    highest = scores.max()
    return float(highest) + math.log(float(_relative(scores, highest, 1.0).sum(dtype=np.float64)))
