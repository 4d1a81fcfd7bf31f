"""The demo model's tokenizer: byte-level BPE with the released pre-tokenizer and chat tokens.

Owns the list of special tokens (spelled as released) and the order of ids: BOS, EOS and pad are
0, 1, 2, then bytes and merges, then the rest of the special tokens at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
THINK, THINK_END = "<think>", "</think>"
IMAGE, NOISE = "<｜deepseek_image｜>", "<｜place▁holder▁no▁0｜>"
LAST_IDS = (
    USER,
    ASSISTANT,
    SYSTEM,
    "<｜latest_reminder｜>",
    THINK,
    THINK_END,
    "｜DSML｜",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    IMAGE,
    NOISE,
)
_WORDS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(LAST_IDS),
        special_tokens=[_special(BOS), _special(EOS), _special(PAD)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([_special(token) for token in LAST_IDS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"{tokenizer.get_vocab_size()} ids instead of {vocab_size}: too little text to train on"
        )
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """`tokenizer_config.json` with the released keys."""

    def token(content: str) -> dict[str, Any]:
        return {
            "__type": "AddedToken",
            "content": content,
            "lstrip": False,
            "normalized": True,
            "rstrip": False,
            "single_word": False,
        }

    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": token(BOS),
        "clean_up_tokenization_spaces": False,
        "eos_token": token(EOS),
        "legacy": True,
        "model_max_length": 4096,
        "pad_token": token(EOS),
        "sp_model_kwargs": {},
        "unk_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def bytes_per_id(tokenizer: Tokenizer) -> list[int]:
    """How many bytes of text each id stands for; 0 for special tokens."""
    special = {BOS, EOS, PAD, *LAST_IDS}
    pieces = (tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size()))
    # In the byte-level alphabet one character is one byte.
    return [0 if piece is None or piece in special else len(piece) for piece in pieces]


def _special(token: str) -> AddedToken:
    return AddedToken(token, normalized=False, special=True)
