"""Rotary embedding against the reference's tables."""

from __future__ import annotations

import json

import pytest
import torch

from compute import rope
from protocol.config import RopeScaling
from tests.golden.cases import DATA, unit

SETTINGS = json.loads((DATA / "units" / "manifest.json").read_text())["units"]["rope"]["params"][:6]


def frequencies(index: int) -> torch.Tensor:
    of = SETTINGS[index]
    scaling = None
    if of["original_seq_len"]:
        scaling = RopeScaling(
            of["factor"], of["beta_fast"], of["beta_slow"], of["original_seq_len"]
        )
    return rope.frequencies(of["dim"], float(of["base"]), scaling)


@pytest.mark.parametrize("index", range(len(SETTINGS)))
def test_angles_drift_from_the_reference_by_no_more_than_the_last_bit_of_pow(index: int) -> None:
    golden = unit("rope")
    positions = golden[f"{index}.positions"]
    got = rope.rotation(positions, frequencies(index))
    # The reference's pow may differ in its last bit, which a position multiplies.
    bound = 1e-6 + positions.double()[:, None] * 2.0**-24 * 2
    for part, value in (("cos", got.cos), ("sin", got.sin)):
        error = (value.double() - golden[f"{index}.{part}"].double()).abs()
        assert bool((error <= bound).all()), f"{part}: {error.max().item():.2e}"


def test_rotating_adjacent_pairs_and_back_equals_the_reference() -> None:
    golden = unit("rope")
    turn = rope.rotation(torch.arange(3, 8), frequencies(5))
    rotated = rope.rotate_tail(golden["apply.x"][0], turn)
    assert torch.equal(rotated, golden["apply.rotated"][0])
    back = rope.rotate_tail(rotated, turn, inverse=True)
    assert torch.equal(back, golden["apply.rotated_then_inverse"][0])
