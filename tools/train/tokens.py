"""Token streams on disk and the batches drawn from them.

Owns the file form (xz of little-endian uint16) and the order of training: every epoch cuts the
stream anew at a random offset and shuffles the pieces, from a seed, so that every model trained
with one seed sees the same batches.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint16]


def save(path: Path, tokens: Tokens) -> None:
    """Write `tokens`, compressed."""
    path.write_bytes(lzma.compress(tokens.astype("<u2").tobytes(), preset=6))


def load(path: Path) -> Tokens:
    """Read what `save` wrote."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), "<u2")


def batches(
    tokens: Tokens, sequences: int, length: int, bos: int, seed: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Endless batches [sequences, length + 1]: BOS, then `length` tokens of the stream."""
    generator = np.random.default_rng(seed)
    while True:
        pieces = _pieces(tokens, length, bos, int(generator.integers(length)))
        order = generator.permutation(len(pieces))
        for start in range(0, len(order) - sequences + 1, sequences):
            yield pieces[order[start : start + sequences]].astype(np.int64)


def held_out_pieces(tokens: Tokens, length: int, bos: int) -> npt.NDArray[np.int64]:
    """[n, length + 1]: the whole stream in order, cut without overlap, each piece after a BOS."""
    return _pieces(tokens, length, bos, 0).astype(np.int64)


def _pieces(tokens: Tokens, length: int, bos: int, offset: int) -> Tokens:
    count = (len(tokens) - offset) // length
    pieces = np.empty((count, length + 1), np.uint16)
    pieces[:, 0] = bos
    pieces[:, 1:] = tokens[offset : offset + count * length].reshape(count, length)
    return pieces
