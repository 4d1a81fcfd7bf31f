"""Matrix products of the model: fp8 weights with quantized inputs, and plain bf16 ones.

Owns the rule which products quantize their input: those with an `Fp8Weight`, never those with a
plain tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compute.formats import dequantize_fp8_weight, round_trip_fp8
from compute.kernels import chunk_kernels

# Splitting a product along K, cuBLAS would otherwise add the parts in bf16.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """An fp8 weight [N, K]: dequantized once, or as stored, which is what kernels read.

    Either `dequantized` [N, K] in `product_dtype`, exact, or uint8 e4m3 `codes` [N, K] and e8m0
    `scales` [ceil(N/32), ceil(K/32)].
    """

    dequantized: torch.Tensor | None = None
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        """[N, K] in `product_dtype`; made anew on every call where the weight is as stored."""
        if self.dequantized is not None:
            return self.dequantized
        codes, scales = self.stored
        kernels = chunk_kernels(codes.device)
        if kernels is not None:
            values: torch.Tensor = kernels.dequantize_fp8_weight(codes, scales)
            return values
        return dequantize_fp8_weight(codes, scales, product_dtype(codes.device))

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`codes` and `scales` of a weight that was loaded as stored."""
        assert self.codes is not None and self.scales is not None, "loaded dequantized"
        return self.codes, self.scales


def product_dtype(device: torch.device) -> torch.dtype:
    """The type that operands of a product are held in.

    bf16 on CUDA, whose products accumulate in fp32. fp32 on CPU: most CPUs have no bf16 product, so
    torch would convert the whole weight on every call or accumulate in bf16.
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def linear_fp8(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """bf16 [..., N] = bf16 `x` [..., K], quantized in groups of 32, times an fp8 weight."""
    return linear_quantized(quantized(x), weight)


def quantized(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` on the fp8 grid as an operand, for products that share their input."""
    kernels = chunk_kernels(x.device)
    if kernels is not None:
        rounded: torch.Tensor = kernels.round_trip_fp8(x)
        return rounded
    return round_trip_fp8(x, product_dtype(x.device))


def linear_quantized(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """`linear_fp8` of an `x` that `quantized` made."""
    return linear(x, weight.values)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """bf16 [..., N] = bf16 `x` [..., K] times `weight` [N, K], accumulated in fp32."""
    return F.linear(x.to(weight.dtype), weight).to(torch.bfloat16)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [T, N] = bf16 `x` [T, K] times `weight` [N, K], bf16 or fp32, not rounded."""
    if x.device.type == "cuda" and weight.dtype == torch.bfloat16:
        # Products of bf16 numbers are exact in fp32: no fp32 copies of the operands are needed.
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
