"""A byte-level BPE tokenizer of any vocabulary size, made up rather than trained.

Owns the order of ids: BOS, EOS and pad are 0, 1, 2 as released, then the bytes, then merges that
spell ever longer runs of letters with and without a leading space, then the chat's control tokens.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from launch.chat_format.vocabulary import REMINDER, SPELLINGS
from protocol.errors import UsageError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, NOISE = "<｜deepseek_image｜>", "<｜place▁holder▁no▁0｜>"
FIRST_TOKENS = (BOS, EOS, PAD)
LAST_TOKENS = (*SPELLINGS.values(), REMINDER, IMAGE, NOISE)
# How the byte-level alphabet writes a space.
SPACE = "Ġ"


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids; raises UsageError where the bytes do not fit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(FIRST_TOKENS) + len(alphabet) + len(LAST_TOKENS)
    if vocab_size < least:
        raise UsageError(
            f"vocab_size is {vocab_size}, a byte-level tokenizer needs at least {least}"
        )
    merges = list(itertools.islice(_merges(), vocab_size - least))
    tokens = [*FIRST_TOKENS, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, normalized=False, special=True) for token in FIRST_TOKENS + LAST_TOKENS
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Every run of letters, shortest first: each is an earlier one with a letter added."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            *head, last = letters
            if head:
                yield "".join(head), last
            yield SPACE + "".join(head), last
