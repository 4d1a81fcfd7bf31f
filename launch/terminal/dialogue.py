"""A conversation a person has in the terminal, as data and as a file.

The file is JSON in the shape of the OpenAI API's messages, so that other tools read it too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.chat_format.conversation import Conversation, Message
from launch.whole_file import whole_file
from protocol.config import require_file
from protocol.errors import UsageError

ROLES = ("system", "user", "assistant")


@dataclass(slots=True)
class Dialogue:
    """`system` is said once at the start; `effort` None answers without reasoning."""

    system: str = ""
    effort: int | None = None
    turns: list[Message] = field(default_factory=list)

    def conversation(self) -> Conversation:
        """Everything said so far. Raises UsageError while there is no question."""
        start = (Message("system", self.system),) if self.system else ()
        return Conversation((*start, *self.turns), effort=self.effort)

    def ask(self, text: str) -> None:
        """Add a question."""
        self.turns.append(Message("user", text))

    def answer(self, text: str, reasoning: str) -> None:
        """Add what was answered, whole or as far as it came."""
        self.turns.append(Message("assistant", text, reasoning=reasoning))

    def take_back(self) -> None:
        """Forget a question that got no answer."""
        if self.turns and self.turns[-1].role == "user":
            self.turns.pop()

    def save(self, path: Path) -> None:
        """Raises UsageError where the file cannot be written."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        messages = start + [_as_dict(message) for message in self.turns]
        text = json.dumps({"messages": messages}, ensure_ascii=False, indent=2)
        try:
            with whole_file(path) as file:
                file.write(text + "\n")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None

    def load(self, path: Path) -> None:
        """Become what `path` holds. Raises UsageError and changes nothing where it is no
        conversation."""
        require_file(path, UsageError)
        try:
            parsed = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: is no JSON text ({error})") from None
        messages = parsed.get("messages") if isinstance(parsed, dict) else None
        if not isinstance(messages, list):
            raise UsageError(f"{path}: has no list of messages")
        turns = [_from_dict(message, path, index) for index, message in enumerate(messages)]
        system = turns[0].text if turns and turns[0].role == "system" else ""
        self.system, self.turns = system, [turn for turn in turns if turn.role != "system"]


def _as_dict(message: Message) -> dict[str, Any]:
    found = {"role": message.role, "content": message.text}
    return found | ({"reasoning_content": message.reasoning} if message.reasoning else {})


def _from_dict(message: Any, path: Path, index: int) -> Message:
    found = message if isinstance(message, dict) else {}
    role, text = found.get("role"), found.get("content")
    reasoning = found.get("reasoning_content", "")
    if role not in ROLES or not isinstance(text, str) or not isinstance(reasoning, str):
        raise UsageError(f"{path}: message {index} is no {', '.join(ROLES)} message with text")
    return Message(role, text, reasoning=reasoning)
