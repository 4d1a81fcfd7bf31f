"""Which engram rows a token looks up: the n-gram hash of `engram_layer_ids`.

Owns the constants (primes, offsets, multipliers), all derived from the config and never stored, and
the hash itself. Everything is numpy int64: a multiplier that has passed through a float names
another, equally valid row. The same tokens give the same rows however a sequence is split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol.config import ModelConfig
from protocol.errors import CheckpointError

Int64 = npt.NDArray[np.int64]
INT64_MAX = int(np.iinfo(np.int64).max)
SEED_PER_LAYER = 10007


@dataclass(frozen=True, eq=False)
class NgramHash:
    """Hash of the n-grams that end at a token, for every engram layer (N of them).

    `classes` [vocab_size] compressed ids; `pad_class` stands where there is no token; `primes`
    [N, max_ngram - 1, heads]; `offsets` [N, rows_per_token], where each head's rows begin in its
    layer's table; `multipliers` [N, max_ngram], odd.
    """

    classes: Int64
    pad_class: int
    primes: Int64
    offsets: Int64
    multipliers: Int64

    @classmethod
    def from_config(
        cls, config: ModelConfig, classes: npt.NDArray[np.integer], path: Path
    ) -> NgramHash:
        """Derive the constants for `config`, whose file is `path` (only for messages).

        `classes` are the compressed ids of the vocabulary. Raises CheckpointError where the derived
        tables have other sizes than `engram_num_embeddings` states.
        """
        primes = table_primes(
            len(config.engram_layer_ids),
            config.engram_max_ngram_size - 1,
            config.engram_n_heads,
            config.engram_vocab_size,
        )
        flat = primes.reshape(len(primes), -1)
        for layer, stated, rows in zip(
            config.engram_layer_ids, config.engram_num_embeddings, flat.sum(axis=1), strict=True
        ):
            if stated != rows:
                raise CheckpointError(
                    f"{path}: engram_num_embeddings states {stated} rows for layer {layer}, but "
                    f"engram_vocab_size {config.engram_vocab_size} gives {rows}; fetch config.json "
                    "again"
                )
        return cls(
            classes=classes.astype(np.int64),
            pad_class=int(classes[config.engram_pad_token_id]),
            primes=primes,
            offsets=np.cumsum(flat, axis=1) - flat,
            multipliers=hash_multipliers(
                config.engram_layer_ids,
                config.engram_max_ngram_size,
                config.engram_compressed_vocab_size,
            ),
        )

    @property
    def reach(self) -> int:
        """How many tokens before a position its n-grams reach back."""
        return int(self.multipliers.shape[1]) - 1

    def rows(self, tokens: Sequence[int] | Int64, history: Sequence[int] | Int64 = ()) -> Int64:
        """Rows of `tokens`, [N, T, rows_per_token], counted from the start of each layer's table.

        `history` are the tokens directly before, oldest first; what it lacks to `reach` lies before
        the sequence. Raises IndexError for an id outside the vocabulary.
        """
        run = np.concatenate([np.asarray(history, np.int64), np.asarray(tokens, np.int64)])
        if run.size and (run.min() < 0 or run.max() >= len(self.classes)):
            raise IndexError(
                f"token id {run.min() if run.min() < 0 else run.max()} is outside the vocabulary "
                f"of {len(self.classes)}"
            )
        padding = np.full(self.reach, self.pad_class, np.int64)
        compressed = np.concatenate([padding, self.classes[run]])
        return self._hash(compressed, self.reach + len(history), len(tokens))

    def _hash(self, compressed: Int64, first: int, count: int) -> Int64:
        layers, lengths, heads = self.primes.shape
        rows = np.empty((layers, count, lengths, heads), np.int64)
        mixed = np.zeros((layers, count), np.int64)
        for back in range(self.reach + 1):
            seen = compressed[first - back : first - back + count]
            mixed ^= seen * self.multipliers[:, back, None]
            if back:
                length = self.primes[:, None, back - 1, :]
                np.remainder(mixed[:, :, None], length, out=rows[:, :, back - 1])
        flat = rows.reshape(layers, count, lengths * heads)
        flat += self.offsets[:, None, :]
        return flat


def table_primes(layers: int, lengths: int, heads: int, floor: int) -> Int64:
    """The modulus of every (layer, n-gram length, head), [layers, lengths, heads], all distinct.

    For each layer and length the search starts at `floor` - 1 and takes, for each head, the
    smallest prime above the previous one that nothing earlier took.
    """
    taken: set[int] = set()
    primes = np.empty((layers, lengths, heads), np.int64)
    for layer in range(layers):
        for length in range(lengths):
            candidates = (prime for prime in _primes_from(floor) if prime not in taken)
            primes[layer, length] = [next(candidates) for _ in range(heads)]
            taken.update(primes[layer, length].tolist())
    return primes


def hash_multipliers(layer_ids: Sequence[int], max_ngram: int, compressed_vocab: int) -> Int64:
    """Odd factors int64 [layers, max_ngram]; a product with a class stays below 2^63."""
    half = max(1, INT64_MAX // compressed_vocab // 2)
    factors = [
        np.random.default_rng(SEED_PER_LAYER * layer).integers(0, half, max_ngram, np.int64) * 2 + 1
        for layer in layer_ids
    ]
    return np.array(factors, np.int64).reshape(len(factors), max_ngram)


def _primes_from(floor: int) -> Iterator[int]:
    """All primes >= `floor`, ascending."""
    candidate = max(floor, 2)
    while True:
        if _is_prime(candidate):
            yield candidate
        candidate += 1


def _is_prime(number: int) -> bool:
    divisors = np.arange(2, int(number**0.5) + 1)
    return bool(np.all(number % divisors))
