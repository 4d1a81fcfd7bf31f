"""A description of faults does what it says, or is refused by the part that is not understood."""

from __future__ import annotations

import pytest

from protocol.errors import UsageError
from protocol.faults import FaultPlan


def _struck(text: str, reads: int, layer: int = 0, expert: int = 0) -> list[int]:
    plan = FaultPlan.parse(text)
    return [number for number in range(1, reads + 1) if plan.strike(layer, expert)]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", []),
        ("eio", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("eio:times=2", [1, 2]),
        ("eio:after=3", [4, 5, 6, 7, 8]),
        ("eio:every=3", [1, 4, 7]),
        ("eio:every=3:after=1:times=2", [2, 5]),
        ("short:times=1,eio:after=6", [1, 7, 8]),
        ("eio:expert=5.6", []),
    ],
)
def test_a_fault_strikes_at_the_reads_it_names(text: str, expected: list[int]) -> None:
    assert _struck(text, 8) == expected


def test_a_fault_of_one_expert_strikes_that_one_only() -> None:
    assert _struck("eio:expert=2.5", 3, layer=2, expert=5) == [1, 2, 3]
    assert _struck("eio:expert=2.5", 3, layer=5, expert=2) == []


def test_a_delay_lasts_as_long_as_it_says_and_a_jittered_one_at_most() -> None:
    plan = FaultPlan.parse("delay:seconds=0.5,delay:seconds=0.5:jitter=1")
    fixed, random = plan.strike()
    assert plan.delay(fixed) == 0.5
    lengths = {plan.delay(random) for _ in range(100)}
    assert len(lengths) == 100 and all(0 <= length < 0.5 for length in lengths)


@pytest.mark.parametrize(
    "text",
    [
        *("explode", "eio:when=1", "eio:times=x", "eio:expert=5", "eio:every=0", "delay:=", ":"),
        *(f"delay:seconds={seconds}" for seconds in ("-1", "3601", "nan")),
    ],
)
def test_what_is_not_understood_is_said(text: str) -> None:
    with pytest.raises(UsageError, match="fault "):
        FaultPlan.parse(text)
