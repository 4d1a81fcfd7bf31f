"""Training rounds to exactly the numbers inference computes with, or every figure is about another
model."""

from __future__ import annotations

import pytest
import torch

from compute import formats
from tools.train import rounding


def _bytes(scale: torch.Tensor) -> torch.Tensor:
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 300.0])
def test_activations_round_as_in_inference(size: float) -> None:
    x = (torch.randn(200, 256, generator=torch.Generator().manual_seed(1)) * size).bfloat16()
    assert torch.equal(rounding.activation(x), formats.round_trip_fp8(x))
    assert torch.equal(rounding.window_kv(x), formats.round_trip_fp8(x))
    assert torch.equal(rounding.index_vector(x), formats.round_trip_fp4_index(x))
    assert torch.equal(rounding.compressed_kv(x), formats.round_trip_fp4_kv(x))


def test_weights_are_used_as_their_stored_codes_decode() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(2)) * 0.1
    codes, scale = rounding.fp4_codes(weight)
    decoded = formats.dequantize_fp4_weight(codes, _bytes(scale))
    assert torch.equal(decoded.bfloat16(), rounding.fp4_weight(weight))
    codes, scale = rounding.fp8_tiles(weight)
    decoded = formats.dequantize_fp8_weight(codes, _bytes(scale))
    assert torch.equal(decoded.bfloat16(), rounding.fp8_weight(weight))
    codes, scale = rounding.fp8_groups(weight)
    decoded = formats.dequantize_engram_rows(codes, _bytes(scale))
    assert torch.equal(decoded, rounding.engram_rows(weight))


def test_gradients_pass_a_rounding_unchanged() -> None:
    weight = torch.randn(32, 32, requires_grad=True)
    wanted = torch.randn(32, 32).bfloat16()
    (rounding.fp8_weight(weight) * wanted).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, wanted.float())
