"""A short version of `tools/soak.py`, which runs for 10,000 requests."""

from __future__ import annotations

from tests.server.real_server import MINI
from tools import soak


def test_short_requests_of_every_kind_leave_memory_flat_through_a_readers_death() -> None:
    account = soak.run(MINI, 60)
    assert account.wrong == []
    assert account.outcomes == {"chat": 42, "refused": 6, "completion": 6, "left": 6}
    growth = account.growth()
    assert set(growth) >= {"server", "compute.process", "expert_io.service"}
    # In so short a run caches still fill, within their budgets of 8 MiB and 16 MiB.
    assert max(growth.values()) < soak.ALLOWED_BYTES + (24 << 20)
