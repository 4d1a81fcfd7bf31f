"""A byte-level BPE tokenizer of any vocabulary size, with the chat format's control tokens.

Its merges mean nothing: they only fill the vocabulary, so that text of any language encodes and
every id decodes.
"""

from __future__ import annotations

from itertools import islice, product

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from protocol.errors import UsageError

FIRST_IDS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
IMAGE = "<｜deepseek_image｜>"
LAST_IDS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜latest_reminder｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    IMAGE,
    "<｜place▁holder▁no▁0｜>",
)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids; raises UsageError where bytes alone need more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fixed = len(FIRST_IDS) + len(alphabet) + len(LAST_IDS)
    if vocab_size < fixed:
        raise UsageError(f"a vocabulary of {vocab_size} is too small; give at least {fixed}")
    pairs = product(alphabet, alphabet)
    triples = ((a + b, c) for a, b, c in product(alphabet, alphabet, alphabet))
    merges = list(islice(pairs, vocab_size - fixed))
    merges += islice(triples, vocab_size - fixed - len(merges))
    entries = [*FIRST_IDS, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {token: number for number, token in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in FIRST_IDS + LAST_IDS]
    tokenizer.add_special_tokens(added)
    return tokenizer
