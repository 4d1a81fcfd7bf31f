"""The compressed vocabulary: which token ids the engram hash treats as one.

Owns the map from token id to class, built from the checkpoint's own `tokenizer.json`. Ids whose
texts differ only in case, accents, width or white space share a class. A map that is off by one
class makes every n-gram name another, equally valid row, so its size is checked against the config
and its digest is there to be shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, normalizers

from protocol.config import ModelConfig, require_file
from protocol.errors import CheckpointError

TOKENIZER_NAME = "tokenizer.json"
# What a byte-level decoder gives for bytes that are no whole character.
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, eq=False)
class TokenMap:
    """`classes` int32 [vocab_size]: the compressed id of every token id, 0 to `size` - 1."""

    classes: npt.NDArray[np.int32]
    size: int

    @classmethod
    def load(cls, directory: Path, config: ModelConfig) -> TokenMap:
        """Build the map of the checkpoint in `directory`; about 2 s for 129,280 ids.

        Raises CheckpointError where the tokenizer cannot be read, has ids that the model has not,
        or gives another number of classes than the config states.
        """
        path = directory / TOKENIZER_NAME
        token_map = cls.from_tokenizer(load_tokenizer(directory, config), config.vocab_size)
        if token_map.size != config.engram_compressed_vocab_size:
            raise CheckpointError(
                f"{path}: its compressed vocabulary has {token_map.size} classes (digest "
                f"{token_map.digest[:12]}), but config.json states engram_compressed_vocab_size "
                f"{config.engram_compressed_vocab_size}; fetch tokenizer.json and config.json of "
                "one revision"
            )
        return token_map

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, vocab_size: int) -> TokenMap:
        """The map over ids 0 to `vocab_size` - 1, classes numbered in order of first appearance."""
        numbers: dict[str, int] = {}
        classes = [
            numbers.setdefault(key, len(numbers)) for key in _class_keys(tokenizer, vocab_size)
        ]
        return cls(np.array(classes, dtype=np.int32), len(numbers))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the map as little-endian int32, in hexadecimal."""
        return hashlib.sha256(self.classes.astype("<i4").tobytes()).hexdigest()


def load_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of the checkpoint in `directory`; raises CheckpointError, also where it has ids
    that the model has no embedding for."""
    path = directory / TOKENIZER_NAME
    tokenizer = read_tokenizer(path)
    spelling, largest = max(tokenizer.get_vocab().items(), key=itemgetter(1), default=("", 0))
    if largest >= config.vocab_size:
        raise CheckpointError(
            f"{path}: {spelling!r} has id {largest}, but config.json states a vocab_size of "
            f"{config.vocab_size}; fetch tokenizer.json and config.json of one revision"
        )
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in `path`; raises CheckpointError."""
    require_file(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; is this a checkpoint's directory?") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 ({error.reason}); fetch it again") from None
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: is no tokenizer ({reason}); fetch it again") from None


def _class_keys(tokenizer: Tokenizer, vocab_size: int) -> Iterator[str]:
    """What decides the class of each id: ids with equal keys share one."""
    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        ]
    )
    # Not str.strip: the two differ on control characters.
    strip = normalizers.Strip()
    texts = tokenizer.decode_batch([[token] for token in range(vocab_size)], False)
    for token, text in enumerate(texts):
        if REPLACEMENT in text:
            yield tokenizer.id_to_token(token) or text
            continue
        folded = fold.normalize_str(text)
        # A token that folds to nothing (a lone accent) keeps its own text as its key.
        yield (folded if folded == " " else strip.normalize_str(folded)) or text
