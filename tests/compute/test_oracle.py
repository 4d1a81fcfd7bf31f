"""The oracle's comparison: a bit that differs is found, whatever the value, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from compute.decode.oracle import MOST_REPORTS, Differences, both_ways


def test_a_bit_that_only_one_way_sets_is_overlooked() -> None:
    tensors = {"same": torch.zeros(4), "zero": torch.zeros(4), "nan": torch.full((2,), torch.nan)}

    def first() -> None:
        tensors["same"].add_(1)
        tensors["zero"][2] = -0.0

    def second() -> str:
        # From the state that the first way began with.
        assert tensors["same"].sum() == 0
        tensors["same"].add_(1)
        return "second's"

    assert both_ways(tensors, first, second) == ("second's", ["zero"])
    assert torch.equal(tensors["same"], torch.ones(4))


def test_a_flood_of_differences_is_counted_and_said_in_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Differences()
    found.add(["streams"] * (MOST_REPORTS + 5), "position 3", "the graph")
    assert found.count == MOST_REPORTS + 5
    said = capsys.readouterr().err.splitlines()
    assert (
        said
        == ["oracle: position 3: streams differs between eager launches and the graph"]
        * MOST_REPORTS
    )
