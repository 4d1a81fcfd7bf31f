"""Tokens reach the experts that were picked for them, and come back to their own places."""

from __future__ import annotations

import torch

from tools.train.moe import place, slots_per_expert
from tools.train.optimizer import schedule


def test_every_pick_has_a_slot_of_its_own_expert() -> None:
    chosen = torch.stack([torch.randperm(8)[:3] for _ in range(50)])
    slot, pick, load = place(chosen, 8, 50)
    flat = chosen.flatten()
    assert torch.equal(slot // 50, flat)
    assert len(slot.unique()) == len(slot)
    assert torch.equal(pick[slot], torch.arange(len(flat)))
    assert torch.equal((load * len(flat)).round().long(), torch.bincount(flat, minlength=8))


def test_what_does_not_fit_is_dropped_and_nothing_else() -> None:
    chosen = torch.zeros(20, 1, dtype=torch.long)
    slot, pick, _ = place(chosen, 4, 8)
    assert int((slot < 8).sum()) == 8
    assert int((slot == 32).sum()) == 12
    assert torch.equal(pick[:8].sort().values, torch.arange(8))
    assert bool((pick[8:] == 20).all())


def test_evaluation_has_room_for_every_token() -> None:
    assert slots_per_expert(100, 4, 32, 1.5, training=False) == 100
    assert slots_per_expert(3200, 4, 32, 1.5, training=True) == 600


def test_rates_need_the_number_of_steps_only_late() -> None:
    assert all(schedule(step, None, 10) == schedule(step, 1000, 10) for step in range(400))
    assert schedule(999, 1000, 10) < 0.01
