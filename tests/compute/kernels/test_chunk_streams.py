"""The streams' kernels for many tokens, and what stands around their products."""

from __future__ import annotations

import pytest
import torch

from compute import formats
from compute.kernels import chunk_dense, chunk_streams
from compute.layers import hyper_connections as torch_streams
from compute.layers.hyper_connections import Mixes
from compute.layers.norm import rms_norm
from compute.weights import MixWeights
from tests.compute.kernels.comparing import DEVICE, assert_close, assert_same_bf16, fp8_weight

SIZES = [(1, 32), (70, 160), pytest.param(300, 5120, marks=pytest.mark.gpu)]


def drawn(tokens: int, width: int, hc: int = 4) -> tuple[torch.Tensor, MixWeights, Mixes]:
    """Streams as they grow through layers, weights that make mixes of every size, and mixes."""
    streams = (torch.randn(tokens, hc, width) * 8).bfloat16()
    fn = torch.randn((2 + hc) * hc, hc * width) * 0.05
    weights = MixWeights(fn=fn, base=torch.randn((2 + hc) * hc), scale=torch.rand(3) + 0.5)
    by = Mixes(torch.rand(tokens, hc), torch.rand(tokens, hc), torch.rand(tokens, hc, hc))
    return streams, weights, by


@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_mixes_of_a_chunk_are_those_of_float64(tokens: int, width: int) -> None:
    streams, weights, _ = drawn(tokens, width)
    flat = streams.double().flatten(1)
    raw = flat @ weights.fn.double().T * flat.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    want = torch_streams.split_mixes(raw, weights.scale.double(), weights.base.double(), 1e-6, 20)
    on_device = MixWeights(
        fn=weights.fn.to(DEVICE), base=weights.base.to(DEVICE), scale=weights.scale.to(DEVICE)
    )
    got = chunk_streams.mixes(streams.to(DEVICE), on_device, 1e-6, 1e-6, 20)
    for ours, true in zip(got, want, strict=True):
        assert (ours.cpu().double() - true).abs().max() < 2e-5
        assert_close(ours.cpu(), true, 3e-6)


@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_an_output_put_back_and_collapsed_is_torchs(tokens: int, width: int) -> None:
    streams, _, by = drawn(tokens, width)
    output, norm = torch.randn(tokens, width).bfloat16(), torch.rand(width) + 0.5
    want = torch_streams.write_back(output, streams, by)
    here = Mixes(*(part.to(DEVICE) for part in by))
    got = chunk_streams.write_back(output.to(DEVICE), streams.to(DEVICE), here)
    # What was rounded is a sum of parts that may cancel.
    assert_same_bf16(got.cpu(), want, 2e-3, size=streams.abs().amax(1, keepdim=True) * 4)
    read = chunk_streams.collapse_norm(want.to(DEVICE), here.pre, norm.to(DEVICE), 1e-6)
    wanted = rms_norm(torch_streams.collapse(want, by.pre), norm, 1e-6)
    assert_close(read.cpu(), wanted, 1e-3)
    assert (read.cpu() != wanted).float().mean() < 0.01


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (70, 160), (64, 256)])
def test_a_weight_is_dequantized_exactly(rows: int, columns: int) -> None:
    codes, scales = fp8_weight(rows, columns)
    got = chunk_dense.dequantize_fp8_weight(codes.to(DEVICE), scales.to(DEVICE))
    assert torch.equal(got.cpu().float(), formats.dequantize_fp8_weight(codes, scales))


def test_inputs_of_products_are_rounded_exactly() -> None:
    x = (torch.randn(70, 96) * torch.logspace(-8, 8, 70).unsqueeze(1)).bfloat16()
    x[3] = 0
    got = chunk_dense.round_trip_fp8(x.to(DEVICE))
    assert torch.equal(got.cpu(), formats.round_trip_fp8(x))
