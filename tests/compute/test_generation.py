"""Symptoms: half a character, a leaking stop string, a cancelled prompt that computes on, rows not
asked for in time, a failed request that spoils the next, a resumed conversation that differs."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer

from compute import generation
from compute.sequence import SequenceState
from compute.text import TokenBytes
from protocol import counters
from protocol.errors import ReadError, StallError
from protocol.messages import PrefillProgress, TokenEvent
from tests.compute.generating import NEVER, Rig, finished, request, text_of, tokens_of
from tests.golden.cases import MINI
from tests.golden.harness import config

EOS = config().eos_token_id
THINK, END_THINK, USER, ASSISTANT = 506, 507, 502, 503
PROMPT = [0, 5, 9, 17, 33, 4, 250, 77, 41, 301]


class Spelled:
    """Token ids from 10 on stand for the given pieces; no tokenizer spells arbitrary ones."""

    added = frozenset({THINK, END_THINK})

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def of(self, token: int) -> bytes:
        return self._pieces[token - 10] if token != EOS else b""


def spelled(pieces: list[bytes], **rig: int) -> Rig:
    """A rig that says `pieces`, a token each, then ends."""
    script = [*range(10, 10 + len(pieces)), EOS]
    return Rig(script=script, token_bytes=cast(TokenBytes, Spelled(pieces)), **rig)


# --- text -----------------------------------------------------------------------------------------


def test_stop_string_over_three_tokens_at_every_split_point():
    stop = "own fox"
    for first, second in itertools.combinations(range(1, len(stop)), 2):
        parts = [f"the br{stop[:first]}", stop[first:second], f"{stop[second:]} jumps", " on"]
        events = spelled([part.encode() for part in parts]).run(request([3], stop=[stop]))
        assert text_of(events) == "the br"
        assert next(event.text for event in events if isinstance(event, TokenEvent)) == "the br"
        assert finished(events).reason == "stop" and finished(events).tokens == 3


def test_stop_string_on_the_last_token_allowed_is_a_stop():
    events = spelled([b"a", b"b", b"c"]).run(request([3], stop=["ab"], max_tokens=2))
    assert finished(events).reason == "stop" and text_of(events) == ""


def test_a_stop_string_begun_at_the_end_is_text():
    events = spelled([b"say ow", b"n"]).run(request([3], stop=["own fox"]))
    assert text_of(events) == "say own" and finished(events).text == "own"
    events = spelled([b"say ow", b"n"]).run(request([3], stop=["own fox"], max_tokens=2))
    assert text_of(events) == "say own" and finished(events).reason == "length"


def test_max_tokens_at_each_byte_of_an_emoji_never_shows_a_part():
    emoji = "🙂".encode()
    for limit in range(1, 6):
        pieces = [b"x", *(emoji[i : i + 1] for i in range(4))]
        events = spelled(pieces).run(request([3], max_tokens=limit))
        assert text_of(events) == ("x🙂" if limit == 5 else "x")
        assert finished(events).tokens == limit and finished(events).reason == "length"


def test_end_of_sequence_ends_unless_it_is_to_be_ignored():
    rig = Rig(script=[40, EOS, 41, 42])
    events = rig.run(request([3], max_tokens=3))
    assert tokens_of(events) == [40, EOS] and finished(events).reason == "stop"
    assert isinstance(events[-2], TokenEvent) and events[-2].text == ""
    events = rig.run(request([4], max_tokens=3, ignore_eos=True))
    assert tokens_of(events) == [40, EOS, 41] and finished(events).reason == "length"


def test_logprobs_come_with_the_token_only_where_asked_for():
    events = Rig().run(request(PROMPT, max_tokens=2, logprobs=3))
    for event in events:
        if isinstance(event, TokenEvent):
            assert event.logprob is not None and event.logprob <= 0
            assert event.top_ids[0] == event.token and len(event.top_logprobs) == 3
    assert all(
        event.logprob is None
        for event in Rig().run(request(PROMPT, max_tokens=2))
        if isinstance(event, TokenEvent)
    )


# --- order of work --------------------------------------------------------------------------------


def test_rows_are_asked_for_ahead_of_everything():
    rig = Rig(script=[20, 21, 22, 23], prompt=10, chunk_tokens=4)
    steps = rig.generator.run(request(PROMPT, max_tokens=3), bool)
    for event in steps:
        rig.log.append(type(event).__name__)
    assert [line for line in rig.log if not line.startswith("Prefill")] == [
        "ask 0-4 after 0",
        "ask 4-8 after 3",  # the next chunk's, before this one's pass
        "run 0-4",
        "ask 8-10 after 3",
        "run 4-8",
        "run 8-10",
        "ask 10-11 after 3",  # a sampled token's, before it is even shown
        "TokenEvent",
        "run 10-11",
        "ask 11-12 after 3",
        "TokenEvent",
        "run 11-12",
        "TokenEvent",  # nobody runs the last one
        "Finished",
    ]


def test_prefill_reports_how_far_it_is():
    events = Rig(script=[20, EOS], prompt=10, chunk_tokens=4).run(request(PROMPT))
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.done for event in progress] == [0, 4, 8, 10]
    assert {event.total for event in progress} == {10}


def test_figures_speak_of_this_request():
    events = Rig(script=[20, 21, 22, 23], prompt=10, chunk_tokens=4).run(
        request(PROMPT, max_tokens=3)
    )
    figures = finished(events).figures
    assert figures[counters.STEPS] == 5 and figures[counters.STALL_EXPERT_S] == 0
    assert 0 < figures[counters.TTFT_S] < 5 and figures[counters.TOKENS_PER_S] > 0
    assert finished(events).prompt_tokens == 10 and finished(events).tokens == 3


# --- ends -----------------------------------------------------------------------------------------


def test_cancel_in_the_middle_of_a_prompt_ends_within_a_chunk_and_keeps_the_done_ones():
    rig = Rig(script=[20, 21, EOS], prompt=10, chunk_tokens=2)
    asked = iter([False, False, True])
    events = rig.run(request(PROMPT), lambda: next(asked))
    assert finished(events).reason == "cancelled" and tokens_of(events) == []
    assert [line for line in rig.log if line.startswith("run")] == ["run 0-2", "run 2-4"]
    again = rig.run(request(PROMPT))
    assert finished(again).reused_tokens == 4 and finished(again).reason == "stop"


def test_cancel_between_tokens_ends_at_once():
    rig = Rig(script=list(range(20, 60)))
    asked = iter([False] * 4 + [True])
    events = rig.run(request([3], max_tokens=30), lambda: next(asked))
    assert finished(events).reason == "cancelled" and tokens_of(events) == [20, 21, 22, 23]


def test_a_consumer_that_leaves_gives_the_rows_back():
    rig = Rig(script=list(range(20, 60)))
    events = rig.generator.run(request([3], max_tokens=30), bool)
    while not isinstance(next(events), TokenEvent):
        pass
    assert rig.engram.open
    events.close()  # type: ignore[attr-defined]
    assert not rig.engram.open


def test_the_context_ends_an_answer():
    rig = Rig(script=list(range(20, 60)), prompt=10, context=13)
    events = rig.run(request(PROMPT, max_tokens=30))
    # Ten of the prompt and three run after it; a fourth is read off but has no place to run.
    assert finished(events).reason == "length" and finished(events).tokens == 4
    events = rig.run(request([3] * 13, max_tokens=30))
    assert finished(events).tokens == 1 and finished(events).reason == "length"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [3] * 1025}, "the prompt has 1025 tokens, more than the context of 1024"),
        ({"prompt": [3, 512]}, "token id 512 is outside the vocabulary of 512"),
        ({"prompt": [3, -1, 5]}, "token id -1 is outside the vocabulary of 512"),
        ({"prompt": [3, 509]}, "token id 509 stands for an image"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"stop": [""]}, "a stop string of 0 characters"),
    ],
)
def test_a_bad_request_is_one_line_and_asks_for_nothing(changes: dict[str, object], message: str):
    rig = Rig(script=[20, EOS])
    events = rig.run(request([3], **changes) if "prompt" not in changes else request(**changes))
    assert finished(events).reason == "error" and len(events) == 1
    assert message in finished(events).error and "\n" not in finished(events).error
    assert rig.log == []
    assert tokens_of(rig.run(request([3]))) == [20, EOS]


@pytest.mark.parametrize("position", [1, 5, 9, 11])
@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (ReadError("shard 3: short"), "read", "shard 3: short"),
        (StallError("layer 5: slow"), "stall", "layer 5: slow"),
        (OSError(errno.ENOMEM, "no"), "resource", "memory cannot be had"),
        (
            ZeroDivisionError("nobody\nforesaw"),
            "internal",
            "internal error: ZeroDivisionError: nobody fore",
        ),
    ],
)
def test_a_failure_in_any_pass_is_this_requests_alone(
    position: int, failure: Exception, kind: str, message: str
):
    rig = Rig(script=[20, 21, 22, EOS], prompt=10, chunk_tokens=4)
    assert rig.scripted is not None
    rig.scripted.fail_at = (position, failure)
    events = rig.run(request(PROMPT))
    assert (finished(events).reason, finished(events).failure) == ("error", kind)
    assert finished(events).error.startswith(message)
    assert "\n" not in finished(events).error
    rig.scripted.fail_at = None
    assert tokens_of(rig.run(request(PROMPT))) == [20, 21, 22, EOS]


# --- states kept ----------------------------------------------------------------------------------


def facts(rig: Rig, prompt: list[int], **changes: object) -> list[tuple[object, ...]]:
    """Tokens and their log-probabilities to the last bit."""
    asked = request(prompt, ignore_eos=True, logprobs=4, **changes)
    return [
        (event.token, event.logprob, *event.top_ids, *event.top_logprobs)
        for event in rig.run(asked)
        if isinstance(event, TokenEvent)
    ]


def test_the_same_prompt_again_is_reused_whole_and_says_the_same_to_the_bit():
    rig = Rig(chunk_tokens=4)
    first = facts(rig, PROMPT, max_tokens=12)
    again = rig.run(request(PROMPT, max_tokens=12))
    assert finished(again).reused_tokens == len(PROMPT)
    assert facts(rig, PROMPT, max_tokens=12) == first
    assert facts(Rig(chunk_tokens=4, kept_bytes=0), PROMPT, max_tokens=12) == first


def test_a_chat_that_goes_on_reuses_the_answer_and_equals_a_fresh_run():
    """With one token a pass a fresh run is cut like the answer was, so every bit is the same."""
    rig = Rig(chunk_tokens=1)
    prompt = [*PROMPT, 20, 21]
    answer = [int(str(fact[0])) for fact in facts(rig, prompt, max_tokens=5)]
    following = [*prompt, *answer, EOS, USER, 60, 61, ASSISTANT, 62]
    resumed = rig.run(request(following, max_tokens=8, ignore_eos=True))
    # The last token of the answer was sampled and never run.
    assert finished(resumed).reused_tokens == len(prompt) + 4
    fresh = Rig(chunk_tokens=1, kept_bytes=0)
    assert tokens_of(resumed) == tokens_of(
        fresh.run(request(following, max_tokens=8, ignore_eos=True))
    )
    assert facts(rig, following, max_tokens=8) == facts(fresh, following, max_tokens=8)


def test_reasoning_dropped_from_the_history_still_reuses_the_question():
    """Where the prompt ended in <think>, the next turn has </think> and no reasoning."""
    rig = Rig(chunk_tokens=64)
    question = [0, USER, 30, 31, 32, ASSISTANT]
    rig.run(request([*question, THINK], max_tokens=6, ignore_eos=True))
    following = [*question, END_THINK, 50, 51, EOS, USER, 33, ASSISTANT, THINK]
    resumed = rig.run(request(following, max_tokens=6, ignore_eos=True))
    assert finished(resumed).reused_tokens == len(question)
    fresh = Rig(chunk_tokens=64, kept_bytes=0)
    assert tokens_of(resumed) == tokens_of(
        fresh.run(request(following, max_tokens=6, ignore_eos=True))
    )


def test_a_shorter_prompt_or_a_changed_one_starts_over():
    rig = Rig(chunk_tokens=64)
    rig.run(request(PROMPT, max_tokens=4, ignore_eos=True))
    fresh = Rig(chunk_tokens=64, kept_bytes=0)
    for prompt in (PROMPT[:-1], [*PROMPT[:4], 99, *PROMPT[5:], 7]):
        events = rig.run(request(prompt, max_tokens=4, ignore_eos=True))
        assert finished(events).reused_tokens == 0
        assert tokens_of(events) == tokens_of(
            fresh.run(request(prompt, max_tokens=4, ignore_eos=True))
        )


def test_seeded_sampling_is_the_same_fresh_and_resumed():
    rig = Rig(chunk_tokens=4)
    asked = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    first = facts(rig, PROMPT, **asked)
    assert facts(rig, PROMPT, **asked) == first
    assert facts(rig, PROMPT, **{**asked, "seed": 6}) != first


def test_kept_states_stay_within_their_bytes_and_the_oldest_goes():
    rig = Rig(kept_bytes=400_000)
    for start in range(3, 15):
        rig.run(request([start, start + 1, start + 2], max_tokens=2, ignore_eos=True))
        assert 0 < rig.kept.nbytes <= 400_000
    assert finished(rig.run(request([3, 4, 5], max_tokens=1))).reused_tokens == 0
    assert finished(rig.run(request([14, 15, 16], max_tokens=1))).reused_tokens == 3


def test_a_state_that_memory_has_no_room_for_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_room(_: SequenceState) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 3 GiB")

    monkeypatch.setattr(SequenceState, "snapshot", no_room)
    rig = Rig(script=[20, 21, EOS])
    for _ in range(2):
        events = rig.run(request([3]))
        assert tokens_of(events) == [20, 21, EOS] and finished(events).reused_tokens == 0
    said = capfd.readouterr().err.splitlines()
    assert said and all("sequence state" in line and "out of memory" in line for line in said)


def test_a_state_larger_than_the_budget_is_not_kept():
    rig = Rig(kept_bytes=1000)
    rig.run(request(PROMPT, max_tokens=2))
    assert rig.kept.nbytes == 0


def test_greedy_text_is_the_text_of_its_tokens_however_the_prompt_is_cut():
    tokenizer = Tokenizer.from_file(str(MINI / "tokenizer.json"))
    prompt = tokenizer.encode("class Number: the THE ta", add_special_tokens=False).ids
    said = {}
    for chunk in (1, 3, 64):
        events = Rig(chunk_tokens=chunk).run(request(prompt, max_tokens=10, ignore_eos=True))
        said[chunk] = tokens_of(events)
        whole = tokenizer.decode(
            [token for token in said[chunk] if token != EOS], skip_special_tokens=False
        )
        assert whole in (text_of(events), text_of(events) + "\ufffd")
    assert all(tokens == said[64] for tokens in said.values()), said


def test_a_long_chunk_is_silent_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PROGRESS_S", 0.0)
    rig = Rig(script=[20, EOS], prompt=10, chunk_tokens=8)
    assert rig.scripted is not None
    layers, forward = config().num_hidden_layers, rig.scripted.forward

    def through_layers(tokens: Sequence[int], *rest: Any, **more: Any) -> torch.Tensor:
        rig.generator.progress.at_layer(layers // 2)
        rig.generator.interruption.check()
        return forward(tokens, *rest, **more)

    monkeypatch.setattr(rig.scripted, "forward", through_layers)
    said: list[PrefillProgress] = []
    list(rig.generator.run(request(PROMPT), NEVER, said.append))
    assert [progress.done for progress in said] == [4, 9]  # half of 8, half of the last 2
    assert {progress.total for progress in said} == {10}
