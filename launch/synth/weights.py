"""Random weights under which a forward pass stays finite and routing spreads over the experts.

Every product keeps its input's size: weights have a standard deviation of one over the root of
their width. Bytes come from a pool drawn once a format and read at a tensor's own offset, so that
hundreds of gigabytes are made at the speed of the disk; the same seed gives the same bytes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from launch.synth.writer import nbytes
from protocol.tensor_table import TILE, TensorSpec

# Bytes or floats in a pool. A prime, so that no two rows of a table fall on the same ones.
POOL = 4_194_301
# e4m3 codes of values that spread over the format's range, and of how large those are.
_FP8_DEVIATION = 24.0
# The root mean square of e2m1 values, every code equally often.
_FP4_DEVIATION = 2.926


class RandomWeights:
    """Call it with a tensor's name and spec for its bytes in pieces."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        normal = random.standard_normal(POOL, dtype=np.float32)
        self._seed = seed
        self._normal = normal
        self._fp8 = _e4m3_codes(normal * _FP8_DEVIATION)
        self._fp4 = random.integers(0, 256, POOL, dtype=np.uint8)

    def __call__(self, name: str, spec: TensorSpec) -> Iterator[bytes]:
        offset = zlib.crc32(f"{self._seed} {name}".encode()) % POOL
        match spec.dtype:
            case "F8_E4M3":
                yield from _stream(self._fp8, offset, nbytes(spec))
            case "I8":
                yield from _stream(self._fp4, offset, nbytes(spec))
            case "F8_E8M0":
                yield from self._scales(name, spec, offset)
            case _:
                yield from self._floats(name, spec, offset)

    def _scales(self, name: str, spec: TensorSpec, offset: int) -> Iterator[bytes]:
        columns = spec.shape[1] * TILE
        if ".engram.embed." in name:
            wanted = 1.0 / _FP8_DEVIATION
        elif ".experts." in name:
            wanted = 1.0 / (_FP4_DEVIATION * math.sqrt(columns))
        else:
            wanted = 1.0 / (_FP8_DEVIATION * math.sqrt(columns))
        exponent = 127 + round(math.log2(wanted))
        # Half of the tiles one step larger: a scale read from the wrong tile must show.
        for piece in _pieces(self._fp4, offset, nbytes(spec)):
            yield (exponent + (piece & 1)).astype(np.uint8).tobytes()

    def _floats(self, name: str, spec: TensorSpec, offset: int) -> Iterator[bytes]:
        """A tensor of full-width floats: norms, biases, the router, embedding and head."""
        deviation = _deviation(name, spec)
        mean = 1.0 if name.endswith(("norm.weight", "hc_attn_scale")) else 0.0
        for piece in _pieces(self._normal, offset, math.prod(spec.shape)):
            values = (piece * deviation + mean).astype("<f4")
            if spec.dtype == "BF16":
                yield (values.view("<u4") >> 16).astype("<u2").tobytes()
            else:
                yield values.tobytes()


def _deviation(name: str, spec: TensorSpec) -> float:
    if name == "embed.weight":
        return 1.0
    if "norm" in name or "bias" in name or name.endswith(("_scale", "_base")):
        return 0.1
    if name.endswith("attn_sink") or ".engram." in name:
        return 1.0
    # Sharper than one over the root: logits and router scores have to differ.
    sharper = 2.0 if name.endswith(("head.weight", "gate.weight")) else 1.0
    return sharper / math.sqrt(spec.shape[-1])


def _stream(pool: npt.NDArray[np.uint8], offset: int, count: int) -> Iterator[bytes]:
    return (piece.tobytes() for piece in _pieces(pool, offset, count))


def _pieces(pool: npt.NDArray[Any], offset: int, count: int) -> Iterator[npt.NDArray[Any]]:
    """`count` elements of the pool from `offset` on, round and round."""
    while count:
        piece = pool[offset : offset + count]
        yield piece
        count -= len(piece)
        offset = 0


def _e4m3_codes(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Nearest e4m3 codes of finite values within its range, by a table of all magnitudes."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    table = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    middles = (table[1:] + table[:-1]) / 2
    magnitudes = np.searchsorted(middles, np.abs(values)).astype(np.uint8)
    signs = np.where(np.signbit(values), 0x80, 0).astype(np.uint8)
    return np.bitwise_or(magnitudes, signs)
