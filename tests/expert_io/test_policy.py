"""Symptoms: a cache that misses every time, a victim in use, a cost that grows with the cache."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from expert_io.policy import POLICIES, EvictionPolicy, Key, RandomAmongOldest, make_policy
from protocol.errors import UsageError


def keys(count: int) -> list[Key]:
    return [(n // 384, n % 384) for n in range(count)]


def misses(policy: EvictionPolicy, accesses: Sequence[Key], slots: int) -> int:
    """A cache of `slots` run over `accesses`."""
    resident: set[Key] = set()
    missed = 0
    for key in accesses:
        if key in resident:
            policy.used(key)
            continue
        missed += 1
        if len(resident) == slots:
            victim = policy.victim(())
            assert victim in resident
            policy.removed(victim)
            resident.remove(victim)
        resident.add(key)
        policy.inserted(key)
    return missed


def test_lru_gives_up_what_was_unused_for_longest() -> None:
    policy = make_policy("lru", 0)
    for key in keys(4):
        policy.inserted(key)
    policy.used((0, 0))
    assert policy.victim(()) == (0, 1)
    assert policy.victim({(0, 1), (0, 2)}) == (0, 3)
    policy.removed((0, 1))
    assert policy.victim(()) == (0, 2)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_without_a_choice_says_so(name: str) -> None:
    policy = make_policy(name, 0)
    assert policy.victim(()) is None
    for key in keys(50):
        policy.inserted(key)
    assert policy.victim(set(keys(50))) is None
    assert policy.victim(set(keys(49))) == keys(50)[49], "the only one that may go"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_use_of_what_is_not_resident_changes_nothing(name: str) -> None:
    policy = make_policy(name, 0)
    policy.used((7, 7))
    policy.removed((7, 7))
    assert policy.victim(()) is None


def test_the_random_victim_is_among_the_oldest_and_differs() -> None:
    policy = make_policy("lru-random", 3)
    everything = keys(1000)
    for key in everything:
        policy.inserted(key)
    oldest = set(everything[: int(1000 * RandomAmongOldest.SHARE)])
    chosen = {policy.victim(()) for _ in range(300)}
    assert chosen <= oldest and len(chosen) > len(oldest) // 2


def test_the_same_seed_gives_the_same_victims() -> None:
    def victims(seed: int) -> list[Key | None]:
        policy = make_policy("lru-random", seed)
        for key in keys(500):
            policy.inserted(key)
        return [policy.victim(()) for _ in range(20)]

    assert victims(1) == victims(1) != victims(2)


def test_a_cyclic_use_of_slightly_more_than_fits_does_not_miss_every_time() -> None:
    """Half a per cent too much: plain recency misses always, a random old victim rarely."""
    accesses = keys(1005) * 20
    assert misses(make_policy("lru", 0), accesses, 1000) == len(accesses)
    avoidable = misses(make_policy("lru-random", 0), accesses, 1000) - 1005
    assert avoidable < (len(accesses) - 1005) * 0.15


def test_evicting_from_a_large_cache_costs_no_more_than_from_a_small_one() -> None:
    def seconds(count: int) -> float:
        policy, chance = make_policy("lru-random", 0), random.Random(0)
        everything = keys(count)
        for key in everything:
            policy.inserted(key)
        begin = time.process_time()
        for _ in range(4000):
            policy.used(everything[chance.randrange(count)])
            victim = policy.victim(())
            assert victim is not None
            policy.removed(victim)
            policy.inserted(victim)
        return time.process_time() - begin

    # The candidates are bounded: 4,000 entries have 256 of them and so have 15,000.
    assert seconds(15_000) < 4 * seconds(4_000)


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no eviction policy 'mru'; there are lru, lru-random"):
        make_policy("mru", 0)
