"""The eviction policies by name, as options and traces call them."""

from __future__ import annotations

from collections.abc import Callable

from expert_io.adaptive import Adaptive
from expert_io.frequency import LayerQuotas, LeastFrequentlyUsed
from expert_io.policy import Clock, EvictionPolicy, LeastRecentlyUsed, RandomAmongOldest
from expert_io.segments import S3Fifo, SegmentedLru, TwoQueues
from protocol.errors import UsageError

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lru-random": RandomAmongOldest,
    "clock": Clock,
    "2q": TwoQueues,
    "slru": SegmentedLru,
    "s3-fifo": S3Fifo,
    "lfu": LeastFrequentlyUsed,
    "layer-quotas": LayerQuotas,
    "adaptive": Adaptive,
}

DEFAULT_POLICY = "adaptive"


def make_policy(name: str, seed: int) -> EvictionPolicy:
    """The policy called `name`; raises UsageError naming those there are."""
    if name not in POLICIES:
        raise UsageError(f"no eviction policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name](seed)
