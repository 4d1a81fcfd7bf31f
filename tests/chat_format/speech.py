"""Replies for tests: text with control tokens spelled out, cut into tokens as fine as it gets."""

from __future__ import annotations

import re
from pathlib import Path

from compute.text import TokenBytes
from engram_io.token_map import load_tokenizer
from launch.chat_format.conversation import Conversation, Message
from launch.chat_format.reply import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ReplyParser,
)
from launch.chat_format.vocabulary import Vocabulary
from protocol.config import ModelConfig

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
CONFIG = ModelConfig.load(MINI)
VOCABULARY = Vocabulary(load_tokenizer(MINI, CONFIG), CONFIG)
TOKENS = VOCABULARY.chat_tokens()
TOKEN_BYTES = TokenBytes(VOCABULARY.tokenizer, [CONFIG.eos_token_id])
SPELLED: dict[str, int] = {
    str(VOCABULARY.tokenizer.id_to_token(number)): number for number in VOCABULARY.special
}
_CONTROL = re.compile("(" + "|".join(map(re.escape, SPELLED)) + ")")
_BYTE_TOKENS = {
    TOKEN_BYTES.of(number): number
    for number in range(VOCABULARY.tokenizer.get_vocab_size())
    if number not in VOCABULARY.special and len(TOKEN_BYTES.of(number)) == 1
}


def byte_tokens(text: str) -> list[int]:
    """One token a byte, control tokens where they are spelled: the hardest shape for a parser."""
    ids: list[int] = []
    for part in _CONTROL.split(text):
        if part in SPELLED:
            ids.append(SPELLED[part])
        else:
            ids += [_BYTE_TOKENS[bytes([byte])] for byte in part.encode()]
    return ids


def model_tokens(text: str) -> list[int]:
    """As the tokenizer would cut it, control tokens where they are spelled."""
    ids: list[int] = []
    for part in _CONTROL.split(text):
        ids += [SPELLED[part]] if part in SPELLED else VOCABULARY.encode(part)
    return ids


def spell(ids: list[int]) -> str:
    """The text of `ids` with control tokens spelled out."""
    return VOCABULARY.tokenizer.decode(ids, skip_special_tokens=False)


def ask(text: str = "hi", **more: object) -> Conversation:
    """A conversation of one user message."""
    return Conversation((Message("user", text),), **more)  # type: ignore[arg-type]


def read(
    ids: list[int],
    conversation: Conversation | None = None,
    *,
    accept_calls: bool = True,
    cut: bool = False,
) -> tuple[str, str, list[tuple[str, str]], ReplyParser]:
    """(reasoning, content, calls as (name, arguments), parser) of a whole reply."""
    parser = ReplyParser(
        TOKEN_BYTES, TOKENS, VOCABULARY.special, conversation or ask(), accept_calls
    )
    deltas: list[Delta] = []
    for token in ids:
        deltas += parser.push(token)
    deltas += parser.finish(cut=cut)
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        match delta:
            case ReasoningDelta(text):
                reasoning += text
            case ContentDelta(text):
                content += text
            case CallStarted(index, _, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ArgumentsDelta(index, text):
                calls[index] = (calls[index][0], calls[index][1] + text)
    return reasoning, content, calls, parser
