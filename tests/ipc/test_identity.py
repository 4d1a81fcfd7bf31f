"""Symptoms: greedy text that depends on how much fits in memory, on prefetch, on the number of
readers, on how processes wait, on what was asked before, or on how the prompt was cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import pytest

from protocol import counters
from protocol.busy_poll import BUSY_POLL_S
from protocol.messages import TokenEvent
from tests.golden.cases import case
from tests.ipc.running_group import ALL_SLOTS, MINIMUM_SLOTS, RunningGroup

# Their last token is an ordinary one and the marks differ, so neither is a prefix of the other.
PROMPTS = ("mini_len017", "mini_len037")
CUT_PROMPTS = ("mini_len003", "mini_len016", "mini_len017")
TOKENS = 16
# What the golden README measures between two honest ways to sum, of all logits.
NOISE = 0.12
CLEAR_GAP = 0.4
ALTERNATIVES = 20


def prompt(name: str) -> list[int]:
    return [int(token) for token in case(name)["prompt_ids"]]


def alternatives(group: RunningGroup, name: str) -> dict[int, float]:
    """The likeliest first tokens of an answer and their log-probabilities."""
    event = next(
        event
        for event in group.events(prompt(name), 1, logprobs=ALTERNATIVES)
        if isinstance(event, TokenEvent)
    )
    return dict(zip(event.top_ids, event.top_logprobs, strict=True))


@dataclass(frozen=True)
class Reference:
    """What a group says that never evicts and never predicts, each prompt asked cold and whole."""

    tokens: dict[str, list[int]]
    alternatives: dict[str, dict[int, float]]


@cache
def reference() -> Reference:
    with RunningGroup(slots=ALL_SLOTS, predicted_in_flight=0, verify_slots=True) as group:
        answers = Reference(
            {name: group.tokens(prompt(name), TOKENS) for name in PROMPTS},
            {name: alternatives(group, name) for name in CUT_PROMPTS},
        )
        assert group.stats()["experts"].get(counters.EVICTIONS, 0) == 0
    return answers


@pytest.mark.parametrize(
    ("readers", "prefetch", "busy_poll"), [(1, 0, 0.0), (4, 2, 0.0), (2, 2, BUSY_POLL_S)]
)
def test_the_smallest_cache_changes_the_text(readers: int, prefetch: int, busy_poll: float) -> None:
    """Asked in the other order, so that what was cold is warm, and once more at the end."""
    with RunningGroup(
        slots=MINIMUM_SLOTS,
        readers=readers,
        predicted_in_flight=prefetch,
        busy_poll=busy_poll,
        verify_slots=True,
    ) as group:
        for name in (*reversed(PROMPTS), PROMPTS[1]):
            assert group.tokens(prompt(name), TOKENS) == reference().tokens[name], name
        experts = group.stats()["experts"]
    # Without these the test would prove nothing.
    assert experts[counters.EVICTIONS] > 200
    assert bool(experts.get(counters.PREDICTED_USED, 0)) == bool(prefetch)


def test_prefetch_with_every_expert_resident_changes_the_text() -> None:
    with RunningGroup(slots=ALL_SLOTS, readers=4, verify_slots=True) as group:
        for name in reversed(PROMPTS):
            assert group.tokens(prompt(name), TOKENS) == reference().tokens[name], name


def test_the_groups_text_differs_from_the_references() -> None:
    """Through all processes, the tokens that the model's own code gives where it is sure."""
    for name, tokens in reference().tokens.items():
        golden = case(name)
        logits = [golden["prefill.logits"], *golden["decode.logits"]]
        for step, (token, row) in enumerate(zip(tokens, logits, strict=False)):
            best = row.topk(2)
            if best.values[0] - best.values[1] <= CLEAR_GAP:
                break  # from here on the two may have gone different ways
            assert token == int(best.indices[0]), f"{name}, token {step}"


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_the_answer_depends_on_how_the_prompt_was_cut(chunk: int) -> None:
    with RunningGroup(chunk_tokens=chunk, verify_slots=True) as group:
        for name, whole in reference().alternatives.items():
            pieces = alternatives(group, name)
            shared = sorted(whole.keys() & pieces.keys())
            assert len(shared) > ALTERNATIVES * 0.7, name
            difference = math.dist([whole[i] for i in shared], [pieces[i] for i in shared])
            assert difference <= NOISE * math.hypot(*(whole[i] for i in shared)), name
            first, second = sorted(whole.values(), reverse=True)[:2]
            if first - second > CLEAR_GAP:
                assert max(pieces, key=pieces.__getitem__) == max(whole, key=whole.__getitem__)
