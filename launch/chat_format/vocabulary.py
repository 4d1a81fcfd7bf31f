"""The special tokens a chat is built from, and plain text that can never contain one.

Owns the tokenizer's two roles: ids of the control tokens, and encoding of everything else with all
recognition of added tokens off.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tokenizers import Tokenizer

from protocol.config import ModelConfig
from protocol.errors import CheckpointError, UsageError


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Ids of the control tokens; `reminder` is None where the tokenizer lacks it."""

    bos: int
    eos: int
    system: int
    user: int
    assistant: int
    think: int
    think_end: int
    dsml: int
    reminder: int | None

    @property
    def turns(self) -> frozenset[int]:
        """Tokens that begin another turn: a reply that samples one is over."""
        reminder = () if self.reminder is None else (self.reminder,)
        return frozenset((self.bos, self.system, self.user, self.assistant, *reminder))


SPELLINGS = {
    "system": "<｜System｜>",
    "user": "<｜User｜>",
    "assistant": "<｜Assistant｜>",
    "think": "<think>",
    "think_end": "</think>",
    "dsml": "｜DSML｜",
}
REMINDER = "<｜latest_reminder｜>"


class Vocabulary:
    """A checkpoint's tokenizer as chats use it. `special` are the ids of all added tokens."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig) -> None:
        self.tokenizer = tokenizer
        self._bos, self._eos = config.bos_token_id, config.eos_token_id
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(added) | {self._bos, self._eos}
        self._spelled = {token.content: number for number, token in added.items()}
        # Released files flag only some control tokens as special, so switching off "special" ones
        # is not enough: without the list of added tokens none of them is recognized.
        bare = json.loads(tokenizer.to_str())
        bare["added_tokens"] = []
        # Post-processors may only name special tokens, which are written here by id.
        bare["post_processor"] = None
        self._plain = Tokenizer.from_str(json.dumps(bare))
        self._plain.no_truncation()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, none of them special whatever it spells. Raises UsageError for what
        was no UTF-8 where it was read."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{text[:40]!r} is not UTF-8 text ({error.reason})") from None
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def id_of(self, spelling: str) -> int | None:
        """The id of an added token."""
        return self._spelled.get(spelling)

    def chat_tokens(self) -> ChatTokens:
        """Raises CheckpointError naming the control tokens that the tokenizer lacks."""
        found = {name: self.id_of(spelling) for name, spelling in SPELLINGS.items()}
        missing = [SPELLINGS[name] for name, number in found.items() if number is None]
        if missing:
            raise CheckpointError(
                f"tokenizer.json has no token {', '.join(missing)}, which chat needs; "
                "use the tokenizer that belongs to the checkpoint, or plain completions"
            )
        present = {name: number for name, number in found.items() if number is not None}
        return ChatTokens(self._bos, self._eos, **present, reminder=self.id_of(REMINDER))
