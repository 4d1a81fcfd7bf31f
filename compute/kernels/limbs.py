"""Activations as fp4 products take them: three signed bytes a value, exactly.

512 times an e4m3 value is an integer of 19 bits. Held as bytes of three limbs it meets fp4 codes in
byte dot products (`numeric.dot_eight`), whose sums over a scale's 32 columns are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compute.kernels.numeric import quantize_e4m3, split_limbs


class Limbs(NamedTuple):
    """Vectors quantized to e4m3, as the integer products of fp4 weights take them.

    `bytes` int8 [3, n, 2, K/2]: 512 * code = bytes[0] + 256 * bytes[1] + 65536 * bytes[2]; the
    halves hold the first and the last four of every eight columns, as one 32-bit word of codes
    meets them. `sums` int32 [n, K/32] of 512 * code over each group; `scales` fp32 [n, K/32],
    powers of two.
    """

    bytes: torch.Tensor
    sums: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, vectors: int, columns: int, device: torch.device) -> Limbs:
        groups = (vectors, columns // 32)
        return cls(
            torch.empty(3, vectors, 2, columns // 2, dtype=torch.int8, device=device),
            torch.empty(groups, dtype=torch.int32, device=device),
            torch.empty(groups, dtype=torch.float32, device=device),
        )


@triton.jit
def store_limbs(y, mask, limbs, limb_stride, sums, scales, first_column, K, BLOCK: tl.constexpr):
    """Quantize fp32 [BLOCK] `y` (whole groups of 32) and store it from `first_column` of K on."""
    code, scale = quantize_e4m3(tl.reshape(y, (BLOCK // 32, 32)))
    low, middle, high = split_limbs(code)
    group = first_column // 32 + tl.arange(0, BLOCK // 32)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    at = (column // 4 % 2) * (K // 2) + column // 8 * 4 + column % 4
    there = tl.reshape(mask, (BLOCK // 32, 32))
    tl.store(limbs + at, low.to(tl.int8), mask=there)
    tl.store(limbs + limb_stride + at, middle.to(tl.int8), mask=there)
    tl.store(limbs + 2 * limb_stride + at, high.to(tl.int8), mask=there)
    whole = tl.max(there.to(tl.int32), axis=1) > 0
    total = tl.sum(low + 256 * middle + 65536 * high, axis=1)
    tl.store(sums + group, total, mask=whole)
    tl.store(scales + group, scale, mask=whole)
