"""Whole prompts through the mini checkpoint: prefill and 40 teacher-forced decode steps."""

from __future__ import annotations

import pytest
import torch

from tests.golden.cases import CASE_NAMES, case
from tests.golden.harness import Mini, TieGuide, golden_ties, relative

# Below this gap between the first and second logit the reference disagrees with itself.
NOISE_GAP = 0.4


def golden_logits(name: str) -> torch.Tensor:
    """fp32 [41, V]: after the prefill and after every decode step."""
    golden = case(name)
    return torch.cat((golden["prefill.logits"].unsqueeze(0), golden["decode.logits"]))


def teacher_forced(name: str, mini: Mini, guide: TieGuide | None = None) -> torch.Tensor:
    golden, state = case(name), mini.model.new_state()
    length = len(golden["prompt_ids"])
    tokens = torch.cat((golden["prompt_ids"], golden["decode.input_ids"])).tolist()
    if guide is not None:
        guide.at(golden, "prefill", slice(None))
    rows = [mini.run(tokens, state, 0, length, every=False)]
    for step in range(40):
        if guide is not None:
            guide.at(golden, "decode", slice(step, step + 1))
        rows.append(mini.run(tokens, state, length + step, length + step + 1, every=False))
    assert state.length == len(tokens)
    assert mini.engram.open == {}
    return torch.stack(rows)


def assert_same_choice(got: torch.Tensor, want: torch.Tensor) -> None:
    best = want.topk(2, -1)
    clear = best.values[:, 0] - best.values[:, 1] > NOISE_GAP
    assert torch.equal(got.argmax(-1)[clear], best.indices[clear, 0])


def bound(name: str) -> float:
    return 0.10 if len(case(name)["prompt_ids"]) > 37 else 0.04


@pytest.mark.parametrize("name", CASE_NAMES)
def test_logits_drift_from_the_reference_beyond_its_own_noise(name: str) -> None:
    with golden_ties() as guide:
        got = teacher_forced(name, Mini(observe=guide), guide)
    want = golden_logits(name)
    assert relative(got[0], want[0]) <= bound(name)
    assert relative(got, want) <= bound(name)
    assert_same_choice(got, want)


@pytest.mark.parametrize("name", ["mini_len003", "mini_len016", "mini_len100"])
def test_breaking_ties_by_age_changes_a_clear_greedy_token(name: str) -> None:
    got, want = teacher_forced(name, Mini()), golden_logits(name)
    assert relative(got, want) <= 0.12
    assert_same_choice(got, want)
