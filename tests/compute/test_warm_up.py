"""A start compiles what prompts launch, asks nobody for it and leaves nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from compute.model import Model
from compute.sequence import SequenceState
from compute.warm_up import warm_up
from launch.child import ROOT
from tests.golden import harness
from tests.golden.cases import DEVICE


def test_the_passes_are_a_whole_chunk_and_short_ones_at_several_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[tuple[int, int]] = []
    forward = Model.forward

    def noted(self: Model, tokens: torch.Tensor, state: SequenceState, ticket: int) -> torch.Tensor:
        passes.append((state.length, len(tokens)))
        return forward(self, tokens, state, ticket)

    monkeypatch.setattr(Model, "forward", noted)
    warm_up(harness.config(), harness.weights(), 96)
    assert passes == [(0, 96), (0, 77), (77, 40), (117, 48)]
    passes.clear()
    warm_up(harness.config(), harness.weights(), 3)
    assert passes == [(0, 3), (0, 3), (3, 3), (6, 3)]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="kernels are compiled for a GPU")
def test_prompts_of_other_lengths_compile_nothing_more() -> None:
    # In a process of its own: what other tests have compiled is compiled already.
    command = [sys.executable, "-m", "tests.compute.later_prompts"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    before, *after = map(int, ran.stdout.split())
    assert before > 10
    assert after == [0] * len(after), ran.stderr
