"""How tools and calls of them are written in the model's markup (DSML).

A tag is `<` or `</`, the DSML token, a space, a name and attributes, `>`. Here the token is a
marker in a list of pieces, because only the sampled token makes a tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launch.chat_format.conversation import ToolCall


@dataclass(frozen=True, slots=True)
class Special:
    """A control token in a prompt, by the field name of `ChatTokens`."""

    name: str


DSML = Special("dsml")
Piece = str | Special

CALLS, INVOKE, PARAMETER = "calls", "invoke", "parameter"


def open_tag(name: str, /, **attributes: str) -> Iterator[Piece]:
    """`<｜DSML｜ name key="value">`"""
    written = "".join(f' {key}="{value}"' for key, value in attributes.items())
    yield from ("<", DSML, f" {name}{written}>")


def close_tag(name: str) -> Iterator[Piece]:
    """`</｜DSML｜ name>`"""
    yield from ("</", DSML, f" {name}>")


def write_calls(calls: Sequence[ToolCall]) -> Iterator[Piece]:
    """The block of all calls of a reply, with the blank line before it."""
    yield "\n\n"
    yield from open_tag(CALLS)
    for call in calls:
        yield "\n"
        yield from _write_call(call)
    yield "\n"
    yield from close_tag(CALLS)


def _write_call(call: ToolCall) -> Iterator[Piece]:
    yield from open_tag(INVOKE, name=call.name)
    yield "\n"
    for name, value in call.parameters().items():
        is_text = isinstance(value, str)
        yield from open_tag(PARAMETER, name=name, string="true" if is_text else "false")
        yield value if is_text else to_json(value)
        yield from close_tag(PARAMETER)
        yield "\n"
    yield from close_tag(INVOKE)


def begin_call(tool: str) -> Iterator[Piece]:
    """The start of a block that has to become a call of `tool`, of any tool where it is ""."""
    yield "\n\n"
    yield from open_tag(CALLS)
    yield "\n"
    if tool:
        yield from open_tag(INVOKE, name=tool)
        yield "\n"
    else:
        yield from ("<", DSML, f' {INVOKE} name="')


def write_tools(tools: Sequence[dict[str, Any]]) -> Iterator[Piece]:
    """The section that tells the model which tools it has, one schema a line.

    The release's own wording ships with the checkpoint and is not known here; this one says the
    same things. Nothing but the wording depends on it.
    """
    yield "## Tools\n\nThe tools listed below can be called to help answer the user. A reply that "
    yield "calls tools ends with a block of this form:\n\n"
    yield from open_tag(CALLS)
    yield "\n"
    yield from open_tag(INVOKE, name="TOOL_NAME")
    yield "\n"
    yield from open_tag(PARAMETER, name="PARAMETER_NAME", string="true|false")
    yield "VALUE"
    yield from close_tag(PARAMETER)
    yield "\n"
    yield from close_tag(INVOKE)
    yield "\n"
    yield from close_tag(CALLS)
    yield '\n\nText is written as it is, with string="true"; numbers, booleans, lists and objects '
    yield 'are written as JSON, with string="false". A block may hold several calls.\n\n'
    yield "The tools, as JSON schemas:\n"
    yield "\n".join(to_json(tool) for tool in tools)


def to_json(value: Any) -> str:
    """JSON on one line, with letters of every script as they are."""
    return json.dumps(value, ensure_ascii=False)


_ATTRIBUTE = re.compile(r'\s+([\w-]+)="([^"]*)"')
_TAG = re.compile(r"\s*([\w-]+)((?:\s+[\w-]+=\"[^\"]*\")*)\s*")


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag the model wrote; `name` is "" where it makes no sense."""

    name: str
    closing: bool
    attributes: dict[str, str]

    @classmethod
    def parse(cls, inside: str, closing: bool) -> Tag:
        """From what stands between the DSML token and `>`."""
        matched = _TAG.fullmatch(inside)
        if matched is None:
            return cls("", closing, {})
        return cls(matched[1], closing, dict(_ATTRIBUTE.findall(matched[2])))
