"""The model's reply, read token by token into reasoning, answer and tool calls.

Owns what is not certain yet: half characters, and line breaks that may belong to a block of calls.
Promises: markup is never answer text, also where the reply is cut short or malformed; the deltas
joined do not depend on how the reply was cut into tokens.
"""

from __future__ import annotations

import codecs
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from compute.text import TokenBytes
from launch.chat_format.conversation import Conversation
from launch.chat_format.dsml import CALLS, INVOKE, PARAMETER, Tag
from launch.chat_format.vocabulary import ChatTokens


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """Call number `index` (from 0) of the reply names its tool."""

    index: int
    identity: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of call number `index`'s JSON arguments."""

    index: int
    text: str


Delta = ReasoningDelta | ContentDelta | CallStarted | ArgumentsDelta


class Place(Enum):
    """Where in the reply the next token stands."""

    REASONING = auto()
    CONTENT = auto()
    TAG = auto()  # after the DSML token, until `>`
    BETWEEN = auto()  # inside a block, outside a parameter
    VALUE = auto()  # inside a parameter


class ReplyParser:
    """Reads one reply. `accept_calls` False drops calls the model was not offered.

    `ended`: the reply is over. `abandoned`: it is, although the model would go on.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        tokens: ChatTokens,
        special: frozenset[int],
        conversation: Conversation,
        accept_calls: bool,
    ) -> None:
        self._token_bytes = token_bytes
        self._tokens = tokens
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._calls = CallReader(accept_calls)
        self._held = ""
        self._tag = ""
        self._quoted = False
        self._closing = False
        self._first: list[Delta] = []
        self.ended = self.abandoned = False
        self.content_characters = 0
        thinking = conversation.effort is not None and conversation.force_call is None
        self._place = Place.REASONING if thinking else Place.CONTENT
        if conversation.force_call is not None:
            self._begin_inside_call(conversation.force_call)

    @property
    def in_content(self) -> bool:
        """Whether the next ordinary token is part of the answer."""
        return self._place is Place.CONTENT and not self.ended

    @property
    def in_reasoning(self) -> bool:
        """Whether the next ordinary token is part of the reasoning."""
        return self._place is Place.REASONING

    @property
    def complete_calls(self) -> int:
        """Calls read to their end."""
        return self._calls.complete

    def push(self, token: int) -> list[Delta]:
        """What became certain with `token`. After `ended` nothing more comes."""
        if self.ended:
            return []
        deltas, self._first = self._first, []
        if token not in self._special:
            deltas += self._text(self._decoder.decode(self._token_bytes.of(token)))
            return deltas
        # A control token ends a character that lacks bytes, as it does in the tokenizer's decoding.
        deltas += self._text(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        deltas += self._control(token)
        return deltas

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What is still held back; half a character is not text and is left out. `cut` says that
        the reply did not end by itself."""
        self.ended = True
        deltas, self._first = self._first, []
        held, self._held = self._held, ""
        begins_block = cut and held.startswith("\n\n<")
        if self._place is not Place.VALUE and not begins_block:
            deltas += self._said(held)
        return deltas

    def _begin_inside_call(self, tool: str) -> None:
        if tool:
            self._first = list(self._calls.tag(Tag(INVOKE, False, {"name": tool})))
            self._place = Place.BETWEEN
        else:
            self._place, self._tag, self._quoted = Place.TAG, f' {INVOKE} name="', True

    def _control(self, token: int) -> Iterator[Delta]:
        if token == self._tokens.eos or token in self._tokens.turns:
            # Going on as somebody else is no part of a reply, and nobody wants the rest of it.
            self.abandoned = token != self._tokens.eos
            yield from self.finish()
        elif token == self._tokens.dsml:
            yield from self._enter_tag()
        elif token == self._tokens.think_end and self._place is Place.REASONING:
            yield from self._flush()
            self._place = Place.CONTENT
        elif token == self._tokens.think and self._place is Place.CONTENT:
            yield from self._flush()
            self._place = Place.REASONING
        # Any other control token says nothing to a reader.

    def _flush(self) -> Iterator[Delta]:
        held, self._held = self._held, ""
        yield from self._said(held)

    def _said(self, text: str) -> Iterator[Delta]:
        if not text:
            return
        if self._place is Place.REASONING:
            yield ReasoningDelta(text)
        elif self._place is Place.CONTENT:
            yield ContentDelta(text)
        elif self._place is Place.VALUE:
            yield from self._calls.value(text)

    def _text(self, text: str) -> Iterator[Delta]:
        if not text:
            return
        if self._place is Place.CONTENT:
            self.content_characters += len(text)
        if self._place is Place.TAG:
            yield from self._tag_text(text)
            return
        whole = self._held + text
        certain = _certain(whole, in_value=self._place is Place.VALUE)
        self._held = whole[certain:]
        yield from self._said(whole[:certain])

    def _enter_tag(self) -> Iterator[Delta]:
        """The DSML token: what is held back before it was the start of this tag."""
        before = self._held
        self._closing = before.endswith("</")
        before = before.removesuffix("</" if self._closing else "<")
        if self._place is not Place.VALUE:
            before = before.removesuffix("\n").removesuffix("\n")
        if self._place is Place.CONTENT:
            self.content_characters -= len(self._held) - len(before)
        self._held = ""
        yield from self._said(before)
        self._place, self._tag, self._quoted = Place.TAG, "", False

    def _tag_text(self, text: str) -> Iterator[Delta]:
        """Text up to the `>` that ends the tag; one inside a quoted attribute does not."""
        for position, character in enumerate(text):
            if character == '"':
                self._quoted = not self._quoted
            elif character == ">" and not self._quoted:
                tag = Tag.parse(self._tag, self._closing)
                yield from self._calls.tag(tag)
                self._place = self._place_after(tag)
                yield from self._text(text[position + 1 :])
                return
            self._tag += character

    def _place_after(self, tag: Tag) -> Place:
        if tag.name == PARAMETER and not tag.closing and self._calls.in_call:
            return Place.VALUE
        if tag.name == CALLS and tag.closing:
            return Place.CONTENT
        return Place.BETWEEN


def _certain(text: str, *, in_value: bool) -> int:
    """How much of `text` cannot be the start of markup: all but a trailing `<` or `</`, and
    outside a value the blank line that would belong to the block."""
    end = len(text)
    for opening in ("</", "<"):
        if text.endswith(opening):
            end -= len(opening)
            break
    if in_value:
        return end
    for _ in range(2):
        if text.endswith("\n", 0, end):
            end -= 1
    return end


class CallReader:
    """Turns tags and values into calls with JSON arguments."""

    def __init__(self, accept: bool) -> None:
        self._accept = accept
        self._index = -1
        self._parameters = 0
        self._as_text = True
        self._value = ""
        self._in_parameter = False
        self.in_call = False
        self.complete = 0

    def tag(self, tag: Tag) -> Iterator[Delta]:
        """A tag the model wrote; one that makes no sense here is passed over."""
        if self._in_parameter:
            yield from self._end_parameter()
        if tag.name == INVOKE and not tag.closing and not self.in_call:
            yield from self._begin_call(tag.attributes.get("name", ""))
        elif tag.name == PARAMETER and not tag.closing and self.in_call:
            yield from self._begin_parameter(tag)
        elif self.in_call and tag.closing and tag.name in (INVOKE, CALLS):
            yield from self._arguments("}" if self._parameters else "{}")
            self.in_call = False
            self.complete += int(self._accept)

    def value(self, text: str) -> Iterator[Delta]:
        """More of the parameter at hand."""
        if self._as_text:
            yield from self._arguments(_escaped(text))
        else:
            self._value += text

    def _begin_call(self, name: str) -> Iterator[Delta]:
        self.in_call = True
        self._parameters = 0
        self._index += 1
        if self._accept:
            yield CallStarted(self._index, f"call_{secrets.token_hex(12)}", name)

    def _begin_parameter(self, tag: Tag) -> Iterator[Delta]:
        name = json.dumps(tag.attributes.get("name", ""), ensure_ascii=False)
        yield from self._arguments(f"{', ' if self._parameters else '{'}{name}: ")
        self._parameters += 1
        self._in_parameter = True
        self._as_text = tag.attributes.get("string", "true") != "false"
        self._value = ""
        if self._as_text:
            yield from self._arguments('"')

    def _end_parameter(self) -> Iterator[Delta]:
        self._in_parameter = False
        if self._as_text:
            yield from self._arguments('"')
            return
        try:
            json.loads(self._value, parse_constant=_refuse)
            written = self._value.strip()
        except (ValueError, RecursionError):
            # Not the JSON it was said to be: as text the client can at least see it.
            written = json.dumps(self._value, ensure_ascii=False)
        yield from self._arguments(written)

    def _arguments(self, text: str) -> Iterator[Delta]:
        if self._accept and text:
            yield ArgumentsDelta(self._index, text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
