"""Every stage of the model on DeepSeek's own inputs, within the error measured there."""

from __future__ import annotations

import pytest

from tests.golden.cases import CASE_NAMES
from tests.golden.stages import OVERALL, Comparison, stages

# All prefills; all 40 decode steps where the sequence begins, wraps its window and is long.
STEPS = {"mini_len001": 40, "mini_len016": 40, "mini_len100": 40}


@pytest.mark.parametrize("name", CASE_NAMES)
def test_a_stage_differs_from_the_reference(name: str) -> None:
    assert stages(name, STEPS.get(name, 4)).faults() == []


def test_stages_differ_more_often_than_rounding_explains() -> None:
    everything = Comparison()
    for name in CASE_NAMES:
        everything.merge(stages(name, STEPS.get(name, 4)))
    assert everything.faults(OVERALL) == []
