"""A prompt as token ids, refused before anything is started where it cannot be run.

Promises: what a person wrote is encoded as plain text, so that it can never spell a control token.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from launch.chat_format.vocabulary import SPELLINGS, Vocabulary
from protocol.config import ModelConfig
from protocol.errors import CheckpointError, UsageError


def raw_prompt(tokenizer: Tokenizer, config: ModelConfig, text: str) -> list[int]:
    """Beginning of sequence and the text."""
    return [config.bos_token_id, *Vocabulary(tokenizer, config).encode(text)]


def chat_prompt(tokenizer: Tokenizer, config: ModelConfig, text: str) -> list[int]:
    """One user turn and the header of an answer without thinking (the release's chat format).

    Raises CheckpointError where the tokenizer has no such control tokens.
    """
    vocabulary = Vocabulary(tokenizer, config)

    def control(role: str) -> int:
        number = vocabulary.id_of(SPELLINGS[role])
        if number is None:
            raise CheckpointError(
                f"tokenizer.json: has no token {SPELLINGS[role]}; use --raw for plain text"
            )
        return number

    return [
        config.bos_token_id,
        control("user"),
        *vocabulary.encode(text),
        control("assistant"),
        control("think_end"),
    ]


def check_prompt(ids: Sequence[int], config: ModelConfig, max_context: int) -> None:
    """Raises UsageError for what no forward pass takes."""
    limit = min(max_context, config.max_position_embeddings)
    if not ids:
        raise UsageError("the prompt is empty; give at least one token")
    if len(ids) > limit:
        raise UsageError(
            f"the prompt has {len(ids)} tokens, more than --max-context {limit}; shorten it"
        )
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise UsageError(
                f"token id {token} is outside the vocabulary of {config.vocab_size} ids"
            )
