"""Random weights in the stored formats, a chunk at a time.

Promises: the same seed gives the same bytes; no chunk is larger than `CHUNK_BYTES`; no scale and no
code is NaN; every product keeps the size of what it is given, so that activations stay finite and
routers and gates neither saturate nor agree on everything.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.tensor_table import TensorSpec

CHUNK_BYTES = 8 << 20
Bytes = npt.NDArray[np.uint8]

# Standard deviation of a product's outputs for inputs of 1; 1 where a name is not listed. What a
# layer adds to the streams is small beside them, so that depth does not make them grow.
GAINS = {"head": 3.0, "ffn.gate": 1.5, "attn.wo_b": 0.4, ".w2": 0.4}
# Vectors that multiply what they meet: near 1.
AROUND_ONE = ("norm.weight", ".q_weight", ".k_weight")
# Added to router scores that lie around 1: enough to matter, too little to decide alone.
SMALL = ("gate.bias", "gate.bias_vl")
# A stored code is a normal number times this: large enough to use the format's range, and its
# largest (2.9 deviations for a byte of randomness, 1.9 for four bits) still has a code.
E4M3_DEVIATION = 16.0
E2M1_DEVIATION = 3.2
# Scales vary by this many powers of two from block to block, which on average enlarges the
# weights; log2 of how much.
SCALE_SPREAD, SCALE_BIAS = 0.5, 0.23


class RandomWeights:
    """Every tensor of a synthetic checkpoint, each from a random stream of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        normal = _normal_quantiles(256)
        self._e4m3 = _nearest_codes(normal * E4M3_DEVIATION, _e4m3_values())
        nibbles = _nearest_codes(_normal_quantiles(16) * E2M1_DEVIATION, _e2m1_values())
        self._e2m1 = (nibbles[None, :] | nibbles[:, None] << 4).reshape(256)
        self._normal = normal

    def chunks(self, name: str, spec: TensorSpec) -> Iterator[npt.NDArray[Any]]:
        """The bytes of tensor `name`, in order, in arrays of any dtype."""
        random = np.random.Generator(np.random.SFC64([self._seed, zlib.crc32(name.encode())]))
        table = self._table(name, spec)
        left = math.prod(spec.shape)
        while left:
            count = min(left, CHUNK_BYTES // table.itemsize)
            yield table[np.frombuffer(random.bytes(count), np.uint8)]
            left -= count

    def _table(self, name: str, spec: TensorSpec) -> npt.NDArray[Any]:
        """What each of 256 equally likely random bytes becomes in this tensor."""
        if spec.dtype == "I8":
            return self._e2m1
        if spec.dtype == "F8_E4M3":
            return self._e4m3
        if spec.dtype == "F8_E8M0":
            return self._scales(name, spec)
        if name.endswith(AROUND_ONE):
            values = 1 + 0.1 * self._normal
        elif name.endswith(SMALL):
            values = 0.1 * self._normal
        elif name.endswith("_scale"):
            values = np.ones_like(self._normal)
        elif len(spec.shape) == 1 or name.endswith("embed.weight"):
            values = self._normal
        else:
            values = self._normal * _gain(name) / math.sqrt(spec.shape[1])
        return values if spec.dtype == "F32" else _bf16(values)

    def _scales(self, name: str, spec: TensorSpec) -> Bytes:
        if ".engram.embed." in name:
            deviation = 1.0 / E4M3_DEVIATION
        else:
            codes = E2M1_DEVIATION if ".ffn.experts." in name else E4M3_DEVIATION
            # A scale stands for 32 columns of its matrix.
            deviation = _gain(name) / math.sqrt(32 * spec.shape[1]) / codes
        exponents = np.rint(math.log2(deviation) - SCALE_BIAS + SCALE_SPREAD * self._normal)
        return (127 + exponents).astype(np.uint8)


def _gain(name: str) -> float:
    matrix, _, _ = name.rpartition(".")
    return next((gain for ending, gain in GAINS.items() if matrix.endswith(ending)), 1.0)


def _normal_quantiles(count: int) -> npt.NDArray[np.float32]:
    """`count` equally likely values of a standard normal variable, ascending."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)], np.float32)


def _nearest_codes(wanted: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> Bytes:
    """For each wanted value the code whose value is nearest; codes of value NaN are never taken."""
    distance = np.nan_to_num(np.abs(wanted[:, None] - values[None, :]), nan=np.inf)
    return distance.argmin(axis=1).astype(np.uint8)


def _e4m3_values() -> npt.NDArray[np.float32]:
    """The value of each of the 256 codes: sign, 4 exponent bits (bias 7), 3 of mantissa."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
    size[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


def _e2m1_values() -> npt.NDArray[np.float32]:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return np.array([*positive, *(-value for value in positive)], np.float32)


def _bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded half up in the last kept bit, which is as good as any rounding for random values."""
    return ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
