"""Symptoms: a seed that does not repeat, ties that depend on the library, cuts that are off by one,
penalties nobody asked for."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from compute.sampling import Sampler, SamplingParams, largest
from protocol.errors import HeadraceError, UsageError


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def draw(params: SamplingParams, logits: torch.Tensor, count: int) -> list[int]:
    sampler = Sampler(params)
    return [sampler.sample(logits).token for _ in range(count)]


def support(logits: torch.Tensor, **params: float) -> set[int]:
    return set(draw(SamplingParams(**params), logits, 2000))  # type: ignore[arg-type]


def test_greedy_tie_goes_to_the_lowest_id_at_any_vocabulary_size():
    for size in (8, 512, 129_280):
        logits = torch.zeros(size)
        logits[[3, 5, size - 1]] = 7.0
        assert draw(SamplingParams(temperature=0.0), logits, 3) == [3, 3, 3]


def test_same_seed_repeats_and_another_does_not():
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))
    first = draw(SamplingParams(seed=7), logits, 50)
    torch.manual_seed(99)  # the global generator has no say
    torch.rand(3)
    assert draw(SamplingParams(seed=7), logits, 50) == first
    assert draw(SamplingParams(seed=8), logits, 50) != first
    assert draw(SamplingParams(seed=-1), logits, 50) != first


def test_two_requests_do_not_share_random_numbers():
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1))
    alone = draw(SamplingParams(seed=7), logits, 20)
    one, other = Sampler(SamplingParams(seed=7)), Sampler(SamplingParams(seed=8))
    mixed = []
    for _ in range(20):
        mixed.append(one.sample(logits).token)
        other.sample(logits)
    assert mixed == alone


def test_frequencies_follow_the_temperature():
    logits = logits_of(0.6, 0.3, 0.1)
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits / temperature, 0)
        seen = Counter(draw(SamplingParams(temperature=temperature), logits, 8_000))
        for token in range(3):
            assert abs(seen[token] / 8_000 - float(expected[token])) < 0.025


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = torch.tensor([1.0, 80.0, 79.99, -math.inf])
    assert set(draw(SamplingParams(temperature=1e-300), logits, 50)) == {1}


@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
def test_top_k_keeps_exactly_k(k: int):
    logits = logits_of(0.3, 0.05, 0.25, 0.2, 0.2)
    order = [0, 2, 3, 4, 1]
    assert support(logits, top_k=k) == set(order[:k])


def test_top_k_cut_through_a_tie_keeps_the_lower_ids():
    logits = torch.zeros(1000)
    logits[700] = 3.0
    assert support(logits, top_k=3) == {700, 0, 1}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {1}), (0.49, {1}), (0.51, {1, 2}), (0.79, {1, 2}), (0.81, {0, 1, 2})]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]):
    assert support(logits_of(0.15, 0.5, 0.3, 0.05), top_p=top_p) == kept


def test_top_p_counts_what_top_k_left():
    # Of 0.4 and 0.3 the first is 0.57 of what top-k left.
    assert support(logits_of(0.4, 0.3, 0.3), top_k=2, top_p=0.5) == {0}
    assert support(logits_of(0.4, 0.3, 0.3), top_k=2, top_p=0.6) == {0, 1}


def test_top_p_of_a_flat_vocabulary_is_wider_than_the_first_look():
    ids = support(torch.zeros(5000), top_p=0.6)
    assert max(ids) < 3000 and max(ids) > 2900


def test_min_p_is_relative_to_the_likeliest():
    logits = logits_of(0.5, 0.26, 0.24)
    assert support(logits, min_p=0.5) == {0, 1}
    assert support(logits, min_p=1.0) == {0}


def test_cuts_see_the_temperature():
    logits = logits_of(0.8, 0.2)
    assert support(logits, min_p=0.3) == {0}
    assert support(logits, min_p=0.3, temperature=3.0) == {0, 1}


def test_penalties_count_what_was_generated_and_nothing_by_default():
    logits = torch.tensor([1.0, 0.9, -5.0])
    greedy = SamplingParams(temperature=0.0)
    assert draw(greedy, logits, 6) == [0] * 6
    presence = SamplingParams(temperature=0.0, presence_penalty=0.5)
    assert draw(presence, logits, 4) == [0, 1, 0, 0]
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.5)
    assert draw(frequency, logits, 4) == [0, 1, 0, 1]
    assert SamplingParams() == SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0
    )


def test_penalties_leave_the_callers_logits_alone():
    logits = torch.tensor([1.0, 0.9])
    draw(SamplingParams(temperature=0.0, frequency_penalty=2.0), logits, 5)
    assert logits.tolist() == pytest.approx([1.0, 0.9])


def test_logprobs_are_the_models_own_before_temperature_and_penalties():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(3))
    expected = torch.log_softmax(logits.double(), 0)
    sampler = Sampler(
        SamplingParams(temperature=0.3, frequency_penalty=1.0, top_k=4, logprobs=5, seed=2)
    )
    for _ in range(5):
        sample = sampler.sample(logits)
        assert sample.logprob == pytest.approx(float(expected[sample.token]), abs=1e-5)
        assert sample.top_ids == torch.topk(expected, 5).indices.tolist()
        assert sample.top_logprobs == pytest.approx(expected[sample.top_ids].tolist(), abs=1e-5)


def test_logprobs_zero_reports_the_chosen_token_only():
    sample = Sampler(SamplingParams(temperature=0.0, logprobs=0)).sample(logits_of(0.25, 0.75))
    assert sample.logprob == pytest.approx(math.log(0.75), abs=1e-6)
    assert sample.top_ids == [] and sample.top_logprobs == []
    assert Sampler(SamplingParams(temperature=0.0)).sample(logits_of(0.5, 0.5)).logprob is None


def test_bfloat16_logits_are_accepted():
    assert draw(SamplingParams(temperature=0.0), torch.tensor([0, 2, 1]).bfloat16(), 1) == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_model_is_named_not_sampled(bad: float):
    with pytest.raises(HeadraceError, match="token 2 is"):
        Sampler(SamplingParams(temperature=0.0)).sample(torch.tensor([0.0, 1.0, bad, 3.0]))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"frequency_penalty": 2.5},
        {"presence_penalty": -3.0},
        {"logprobs": 21},
    ],
)
def test_a_value_out_of_range_is_named(bad: dict[str, float]):
    with pytest.raises(UsageError, match=next(iter(bad))):
        Sampler(SamplingParams(**bad))  # type: ignore[arg-type]


def test_largest_agrees_with_a_full_stable_sort():
    random = np.random.default_rng(0)
    for most in (40, 4_000) * 100:
        size = int(random.integers(1, most))
        scores = random.integers(0, 6, size).astype(np.float32)
        count = int(random.integers(0, size + 3))
        assert (
            largest(scores, count).tolist() == np.argsort(-scores, kind="stable")[:count].tolist()
        )


def in_a_large_vocabulary(probabilities: dict[int, float], size: int = 129_280) -> torch.Tensor:
    logits = torch.full((size,), -math.inf)
    for token, probability in probabilities.items():
        logits[token] = math.log(probability)
    return logits


def test_frequencies_hold_over_a_large_vocabulary():
    expected = {0: 0.1, 255: 0.2, 256: 0.3, 70_000: 0.25, 129_279: 0.15}
    seen = Counter(draw(SamplingParams(seed=3), in_a_large_vocabulary(expected), 4_000))
    assert seen.keys() == expected.keys()
    for token, probability in expected.items():
        assert abs(seen[token] / 4_000 - probability) < 0.03


def test_a_large_flat_vocabulary_is_drawn_from_end_to_end():
    drawn = draw(SamplingParams(seed=5), torch.zeros(1_001), 20_000)
    assert set(drawn) == set(range(1_001))


def test_cuts_of_a_large_vocabulary_are_those_of_a_full_sort():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(129_280, generator=generator).mul(2).round(decimals=1)
    logits[torch.randperm(129_280, generator=generator)[:40]] += 9
    order = torch.sort(-logits, stable=True).indices
    weights = (logits.double() / 0.7).softmax(0)[order]
    within = int((weights.cumsum(0) < 0.5).sum()) + 1
    likely = int((weights >= 0.4 * weights[0]).sum())
    for params, kept in (
        ({"top_k": 30}, 30),
        ({"top_p": 0.5}, within),
        ({"min_p": 0.4}, likely),
    ):
        drawn = draw(SamplingParams(temperature=0.7, **params), logits, 3_000)  # type: ignore[arg-type]
        assert set(drawn) <= set(order[:kept].tolist()), params
        assert len(set(drawn)) > 0.6 * kept, params
