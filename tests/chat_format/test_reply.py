"""Replies: reasoning, answer and calls come apart, and markup never becomes answer text."""

from __future__ import annotations

import json
import random

import pytest

from launch.chat_format.conversation import Conversation
from launch.chat_format.reply import ReasoningDelta, ReplyParser
from tests.chat_format.speech import (
    TOKEN_BYTES,
    TOKENS,
    VOCABULARY,
    ask,
    byte_tokens,
    model_tokens,
    read,
)

EOS = "<｜end▁of▁sentence｜>"
BLOCK = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Kö"ln</b> <\n\n</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
    '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="time">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
WHOLE = "count 1 < 2\n\nagain</think>It is 🌍 地球.\n\nSee <b>:" + BLOCK + EOS
THINKING = ask(effort=75)


@pytest.mark.parametrize("cut", [byte_tokens, model_tokens])
def test_reasoning_answer_and_calls_come_apart(cut: object) -> None:
    reasoning, content, calls, parser = read(cut(WHOLE), THINKING)  # type: ignore[operator]
    assert reasoning == "count 1 < 2\n\nagain"
    assert content == "It is 🌍 地球.\n\nSee <b>:"
    assert [name for name, _ in calls] == ["weather", "time"]
    assert json.loads(calls[0][1]) == {"city": 'Kö"ln</b> <\n\n', "days": 3}
    assert calls[1][1] == "{}"
    assert parser.ended and parser.complete_calls == 2


def test_every_cut_leaves_no_markup_in_the_answer() -> None:
    ids = byte_tokens(WHOLE)
    for end in range(len(ids)):
        reasoning, content, calls, parser = read(ids[:end], THINKING, cut=True)
        assert "count 1 < 2\n\nagain".startswith(reasoning)
        assert "It is 🌍 地球.\n\nSee <b>:\n\n".startswith(content)
        assert "DSML" not in "".join((reasoning, content, *(a for _, a in calls)))
        assert parser.complete_calls <= len(calls)


def test_text_that_comes_early_is_not_held_back() -> None:
    parser = ReplyParser(TOKEN_BYTES, TOKENS, VOCABULARY.special, THINKING, True)
    assert parser.push(byte_tokens("a")[0]) == [ReasoningDelta("a")]
    assert parser.push(byte_tokens("<")[0]) == []
    assert parser.push(byte_tokens("b")[0]) == [ReasoningDelta("<b")]


def test_markup_spelled_in_ordinary_tokens_is_text() -> None:
    spelled = "<｜DSML｜ calls></think>"
    ids = VOCABULARY.encode(spelled)
    _, content, calls, _ = read(ids)
    assert (content, calls) == (spelled, [])


def test_calls_nobody_offered_are_dropped_and_are_no_content() -> None:
    _, content, calls, parser = read(byte_tokens("Well." + BLOCK + EOS), accept_calls=False)
    assert (content, calls, parser.complete_calls) == ("Well.", [], 0)


def test_a_trailing_line_break_that_begins_no_block_is_kept() -> None:
    assert read(byte_tokens("a\n\n" + EOS))[1] == "a\n\n"
    assert read(byte_tokens("a <" + EOS))[1] == "a <"


def test_calls_inside_reasoning_are_calls() -> None:
    reasoning, content, calls, _ = read(byte_tokens("so" + BLOCK + EOS), THINKING)
    assert (reasoning, content, len(calls)) == ("so", "", 2)


def test_a_reply_that_goes_on_as_somebody_else_is_over() -> None:
    _, content, _, parser = read(byte_tokens("Yes.<｜User｜>And now"))
    assert content == "Yes." and parser.ended


def test_control_tokens_without_meaning_here_are_dropped() -> None:
    assert read(byte_tokens("a<｜deepseek_image｜>b</think>c" + EOS))[1] == "abc"


def test_a_forced_call_is_read_from_its_middle() -> None:
    named = ask(effort=75, force_call="weather")
    rest = BLOCK.split('name="weather">\n')[1]
    _, content, calls, _ = read(byte_tokens(rest + EOS), named)
    assert content == "" and json.loads(calls[0][1])["days"] == 3 and calls[0][0] == "weather"
    anything = ask(force_call="")
    _, content, calls, _ = read(byte_tokens('weather">\n' + rest + EOS), anything)
    assert content == "" and [name for name, _ in calls] == ["weather", "time"]


@pytest.mark.parametrize("value", ["{broken", "NaN", "[1, 2"])
def test_a_value_that_is_no_json_still_gives_valid_arguments(value: str) -> None:
    block = (
        '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="x" '
        f'string="false">{value}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    )
    assert json.loads(read(byte_tokens(block))[2][0][1]) == {"x": value}


def test_a_broken_character_before_a_control_token_is_replaced_and_at_the_end_left_out() -> None:
    half = byte_tokens("🌍")[:2]
    assert read([*half, *byte_tokens("</think>a")], THINKING)[:2] == ("\ufffd", "a")
    assert read([*byte_tokens("a"), *half])[1] == "a"


def test_random_markup_never_raises_and_never_leaks() -> None:
    draw = random.Random(5)
    words = ["｜DSML｜", "</", "<", ">", " calls", " invoke", ' name="', '"', " parameter", "\n\n"]
    words += ["<think>", "</think>", "x", ' string="false"', "｜DSML｜ calls>"]
    for _ in range(2000):
        text = "".join(draw.choices(words, k=draw.randrange(1, 30)))
        conversation: Conversation = draw.choice([ask(), THINKING, ask(force_call="f")])
        reasoning, content, calls, _ = read(byte_tokens(text), conversation, cut=True)
        assert "DSML" not in reasoning + content
        assert all("DSML" not in arguments for _, arguments in calls)
