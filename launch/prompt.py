"""A prompt as token ids.

Promises: what a person wrote is encoded as plain text, so that it can never spell a control token.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from protocol.config import ModelConfig
from protocol.errors import CheckpointError

USER, ASSISTANT, THINK_END = "<｜User｜>", "<｜Assistant｜>", "</think>"


def raw_prompt(tokenizer: Tokenizer, config: ModelConfig, text: str) -> list[int]:
    """Beginning of sequence and the text."""
    return [config.bos_token_id, *encode_text(tokenizer, text)]


def chat_prompt(tokenizer: Tokenizer, config: ModelConfig, text: str) -> list[int]:
    """One user turn and the header of an answer without thinking (the release's chat format)."""
    return [
        config.bos_token_id,
        control_token(tokenizer, USER),
        *encode_text(tokenizer, text),
        control_token(tokenizer, ASSISTANT),
        control_token(tokenizer, THINK_END),
    ]


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """`text` without any special token, also where it spells one."""
    tokenizer.encode_special_tokens = True
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def control_token(tokenizer: Tokenizer, token: str) -> int:
    """The id of a control token; raises CheckpointError where the tokenizer has none."""
    number: int | None = tokenizer.token_to_id(token)
    if number is None:
        raise CheckpointError(f"tokenizer.json: has no token {token}; use --raw for plain text")
    return number
