"""What a chat consists of, independent of the API it came through and of how it is written.

Only data and the checks that make a conversation one the format can express.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from protocol.errors import UsageError

Role = Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]

# How thorough reasoning is asked to be, from 1 to 100. The format names low, high and max; the
# other names are those clients of the OpenAI API send, mapped to the nearest.
EFFORTS = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 100, "max": 100}
DEFAULT_EFFORT = EFFORTS["high"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call the model made. `arguments` is a JSON object as text."""

    identity: str
    name: str
    arguments: str

    def parameters(self) -> dict[str, Any]:
        """The arguments by name; raises UsageError where they are no JSON object."""
        try:
            parsed = json.loads(self.arguments or "{}")
            # Half of a surrogate pair is sound JSON and no text.
            json.dumps(parsed, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise UsageError(f"arguments of the call to {self.name!r} are not a JSON object")
        return parsed


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `reasoning` and `tool_calls` belong to the assistant, `answers` (the identity of
    the call) to a tool."""

    role: Role
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    answers: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Everything the next reply depends on.

    `tools` are function schemas (`name`, `description`, `parameters`). `effort` is None where the
    model is to answer without reasoning. `force_call` makes the reply begin inside a call: of the
    named tool, or of any where it is "".  `schema` is a JSON schema the answer is asked to follow.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    effort: int | None = None
    force_call: str | None = None
    schema: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.messages:
            raise UsageError("messages is empty, expected at least one")
        if self.messages[-1].role == "assistant":
            raise UsageError(
                "the last message is the assistant's; end with one for the model to answer"
            )
        called: set[str] = set()
        for index, message in enumerate(self.messages):
            if message.role == "tool" and message.answers not in called:
                raise UsageError(
                    f"messages[{index}].tool_call_id is {message.answers!r}, "
                    "which no earlier tool call has"
                )
            called.update(call.identity for call in message.tool_calls)
