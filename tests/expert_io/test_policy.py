"""Symptoms: a cache that misses every time, a victim in use, a cost that grows with the cache."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from expert_io.belady import Belady
from expert_io.policies import POLICIES, make_policy
from expert_io.policy import EvictionPolicy, Key, RandomAmongOldest
from protocol.errors import UsageError


def keys(count: int) -> list[Key]:
    return [(n // 384, n % 384) for n in range(count)]


def misses(policy: EvictionPolicy, accesses: Sequence[Key], slots: int) -> int:
    """A cache of `slots` run over `accesses`."""
    resident: set[Key] = set()
    missed = 0
    for now, key in enumerate(accesses):
        if isinstance(policy, Belady):
            policy.now = now
        policy.used(key)
        if key in resident:
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


def test_a_loop_over_slightly_more_than_fits_misses_little_more_than_it_must() -> None:
    """Of 1,005 keys 40 are used ten times a round, and those must not go either."""
    one_round = [key for n, key in enumerate(keys(1005)) for key in (key, (9, n % 40))[: 1 + n % 2]]
    accesses = one_round * 20
    least = belady(accesses, 1000)
    assert misses(make_policy("adaptive", 0), accesses, 1000) < 2 * least
    assert misses(make_policy("lru-random", 0), accesses, 1000) > 3 * least


def test_text_that_moves_on_is_not_held_up_by_what_it_left_behind() -> None:
    """Topics come and go, each with its own popular keys; some return later."""
    chance = random.Random(1)
    topics = [[(0, n) for n in chance.sample(range(300), 60)] for _ in range(6)]
    order = [chance.choice(topics) for _ in range(40)]
    accesses = [
        topic[min(59, int(chance.paretovariate(0.6)))] for topic in order for _ in range(400)
    ]
    adaptive, lru = (misses(make_policy(name, 0), accesses, 60) for name in ("adaptive", "lru"))
    assert adaptive < 1.05 * lru


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_order_of_events_makes_a_policy_name_a_wrong_victim(name: str, seed: int) -> None:
    """Against a plain set of what is resident: never an absent or protected key, never None while
    there is a choice."""
    policy, chance = make_policy(name, seed), random.Random(seed)
    everything = keys(60)
    resident: set[Key] = set()
    for _ in range(4000):
        key = chance.choice(everything)
        match chance.randrange(4):
            case 0 if key not in resident:
                policy.inserted(key)
                resident.add(key)
            case 1:
                policy.removed(key)
                resident.discard(key)
            case 2:
                policy.used(key)
            case _:
                protected = set(chance.sample(everything, chance.randrange(60)))
                victim = policy.victim(protected)
                if resident <= protected:
                    assert victim is None
                else:
                    assert victim in resident - protected


def skewed(count: int, seed: int) -> list[Key]:
    """Popular and rare keys, as routing has them."""
    chance = random.Random(seed)
    return [(0, min(199, int(chance.paretovariate(0.7)))) for _ in range(count)]


def belady(accesses: Sequence[Key], slots: int) -> int:
    """Misses with the future known."""
    return misses(Belady(enumerate(accesses)), accesses, slots)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_policy_beats_the_one_that_knows_the_future(name: str) -> None:
    for seed, slots in ((0, 10), (1, 40), (2, 120)):
        accesses = skewed(4000, seed)
        assert misses(make_policy(name, 0), accesses, slots) >= belady(accesses, slots)


def test_belady_is_exact_where_the_answer_is_known() -> None:
    a, b, c, d = keys(4)
    # With two slots, c must push out b (used last), then d must push out c.
    assert belady([a, b, c, a, c, b, d, a, b], 2) == 6
    # A loop over n + 1 keys misses once in n uses.
    assert belady(keys(11) * 20, 10) == 11 + 19 * 11 // 10


@pytest.mark.parametrize("name", ["2q", "slru", "s3-fifo", "lfu"])
def test_a_scan_of_rare_keys_does_not_flush_what_is_used_again_and_again(name: str) -> None:
    often, rare = keys(40), [(9, n) for n in range(3000)]
    accesses = often * 5
    for n in range(0, 3000, 30):
        accesses += rare[n : n + 30] + often
    plain = misses(make_policy("lru", 0), accesses, 60) - 3000
    assert misses(make_policy(name, 0), accesses, 60) - 3000 < plain / 4


def test_frequency_alone_does_not_keep_what_was_popular_long_ago() -> None:
    old, new = keys(20), [(5, n) for n in range(20)]
    accesses = old * 100 + new * 100
    assert misses(make_policy("lfu", 0), accesses, 20) < 40 + 20 * 60


def test_layers_share_the_cache_equally_under_quotas() -> None:
    policy = make_policy("layer-quotas", 0)
    for key in [(0, n) for n in range(30)] + [(1, n) for n in range(10)]:
        policy.inserted(key)
    for _ in range(20):
        victim = policy.victim(())
        assert victim is not None and victim[0] == 0
        policy.removed(victim)
    assert policy.victim({(0, n) for n in range(30)}) == (1, 0)


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no eviction policy 'mru'; there are 2q, adaptive"):
        make_policy("mru", 0)
