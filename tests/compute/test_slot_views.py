"""How an arena is registered with a GPU; registering itself needs one."""

from __future__ import annotations

import mmap

import pytest

from compute import slot_views
from compute.slot_views import registered_pieces


@pytest.mark.parametrize("slot_bytes", [mmap.PAGESIZE, 512, 24 * 512, 18_800_640])
def test_a_copy_of_a_slot_crosses_from_one_registration_into_another(
    slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_views, "_REGISTER_BYTES", 10_000)
    slots = 101
    pieces = list(registered_pieces(slots, slot_bytes))
    assert [offset for offset, _ in pieces] == [
        sum(size for _, size in pieces[:at]) for at in range(len(pieces))
    ]
    assert sum(size for _, size in pieces) == slots * slot_bytes
    assert len(pieces) > 1
    for offset, _ in pieces:
        assert offset % slot_bytes == 0 and offset % mmap.PAGESIZE == 0
