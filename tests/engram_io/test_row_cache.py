"""The hot-row cache: never a wrong row, never over its budget."""

from __future__ import annotations

import numpy as np
import pytest

from engram_io.row_cache import ABSENT, WAYS, RowCache

RECORD = 24


def record_of(keys: np.ndarray) -> np.ndarray:
    """A record that tells its key."""
    repeated = np.repeat(keys[:, None], 3, axis=1).astype(np.int64) * [1, 7, 31]
    return repeated.view(np.uint8).reshape(len(keys), RECORD)


def once(keys: np.ndarray) -> np.ndarray:
    return np.ones(len(keys), np.int64)


def test_a_found_row_is_always_the_row_asked_for() -> None:
    cache = RowCache(200 * (RECORD + 16), RECORD)
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        keys = np.unique(rng.zipf(1.3, rng.integers(1, 60)) % 100_000)
        places = cache.find(keys)
        known = places != ABSENT
        hits += int(known.sum())
        np.testing.assert_array_equal(cache.records(places[known]), record_of(keys[known]))
        missing = keys[~known]
        cache.insert(missing, record_of(missing), once(missing))
    assert hits > 1000


@pytest.mark.parametrize("budget", [0, 1, 5000, 100_000, 1 << 20])
def test_cache_stays_within_its_budget_of_bytes(budget: int) -> None:
    cache = RowCache(budget, RECORD)
    for begin in range(0, 50_000, 5000):
        keys = np.arange(begin, begin + 5000)
        cache.insert(keys, record_of(keys), once(keys))
    assert cache.nbytes <= budget
    found = cache.find(np.arange(50_000)) != ABSENT
    assert found.sum() <= cache.capacity
    assert found.any() == (cache.capacity > 0)


def test_the_row_used_longest_ago_gives_way() -> None:
    cache = RowCache((RECORD + 16) * WAYS, RECORD)  # a single set
    for key in range(WAYS):
        cache.find(np.array([key]))
        cache.insert(np.array([key]), record_of(np.array([key])), once(np.array([key])))
    cache.find(np.array([0]))
    cache.find(np.array([100]))
    cache.insert(np.array([100]), record_of(np.array([100])), once(np.array([100])))
    kept = cache.find(np.arange(WAYS)) != ABSENT
    assert kept.tolist() == [True, False] + [True] * (WAYS - 2)


def test_a_long_prompt_does_not_push_out_what_decoding_uses() -> None:
    cache = RowCache((RECORD + 16) * WAYS * 256, RECORD)
    hot = np.arange(200)
    cache.find(hot)
    cache.insert(hot, record_of(hot), once(hot))
    prompt = np.arange(10_000, 100_000)
    cache.find(prompt)
    cache.insert(prompt, record_of(prompt), once(prompt))
    assert (cache.find(hot) != ABSENT).mean() > 0.9


def test_of_a_large_request_the_rows_asked_most_often_stay() -> None:
    cache = RowCache((RECORD + 16) * WAYS * 256, RECORD)
    keys = np.arange(50_000)
    asked = once(keys)
    asked[::500] = 9
    cache.insert(keys, record_of(keys), asked)
    assert (cache.find(keys[::500]) != ABSENT).all()
