"""Whole prompts through the mini checkpoint: prefill and 40 teacher-forced decode steps."""

from __future__ import annotations

import pytest
import torch

from tests.golden.cases import CASE_NAMES, DEVICE, case
from tests.golden.harness import Capture, Mini, TieGuide, golden_ties, relative

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
    if len(case(name)["prompt_ids"]) > 37:
        return 0.10
    # Behind a near tie that a last bit decides, see the test at the end.
    return 0.12 if name == "mini_len016" and DEVICE.type == "cuda" else 0.04


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


@pytest.mark.skipif(DEVICE.type != "cpu", reason="about the exponential of this CPU")
def test_a_gpus_drift_in_one_case_comes_from_something_else_than_one_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With exp rounded exactly, a CPU drifts in `mini_len016` as a GPU does: by one expert.

    One attention probability of layer 1 lies on a rounding boundary of bf16, and the reference's
    exp is a last bit too large there. The row it moves decides layer 5's narrowest gate, at the
    prompt's last token, so the logits show it.
    """
    exp, name = torch.exp, "mini_len016"
    monkeypatch.setattr(torch, "exp", lambda x: exp(x.double()).to(x.dtype))
    golden, capture = case(name), Capture()
    tokens = golden["prompt_ids"].tolist()
    with golden_ties() as guide:
        guide.at(golden, "prefill", slice(None))

        def observe(kind: str, layer: int, tensor: torch.Tensor) -> None:
            guide(kind, layer, tensor)
            capture(kind, layer, tensor)

        mini = Mini(observe=observe)
        logits = mini.run(tokens, mini.model.new_state(), 0, len(tokens), every=False)
    flipped = []
    for layer in range(6):
        got = capture[f"layers.{layer}.gate_indices"].sort(-1).values
        want = golden[f"prefill.layers.{layer}.gate_indices"].sort(-1).values
        flipped += [(layer, row) for row in (got != want).any(-1).nonzero().flatten().tolist()]
    assert flipped == [(5, len(tokens) - 1)]
    assert 0.05 < relative(logits, golden["prefill.logits"]) < bound("mini_len100")
    first = relative(capture["layers.0.stream_out"], golden["prefill.layers.0.stream_out"])
    assert first == 0
