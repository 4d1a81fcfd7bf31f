"""Single kernels against DeepSeek's own results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from compute.formats import dequantize_fp4_weight, dequantize_fp8_weight, round_trip_fp8
from compute.layers import hyper_connections, moe
from compute.layers.linear import Fp8Weight, linear, linear_fp8, quantized
from compute.layers.norm import rms_norm
from compute.sources import ExpertBytes
from compute.weights import GateWeights, SharedExpertWeights
from protocol.config import ModelConfig
from tests.golden.cases import DATA, MINI, unit

UNITS: dict[str, Any] = json.loads((DATA / "units" / "manifest.json").read_text())["units"]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def bf16_steps_apart(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance in representable bf16 values."""
    assert got.dtype == want.dtype == torch.bfloat16 and got.shape == want.shape
    ranks = []
    for tensor in (got, want):
        bits = tensor.contiguous().view(torch.int16).int()
        ranks.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return (ranks[0] - ranks[1]).abs()


@pytest.mark.parametrize("index", range(3))
def test_fp8_product_quantizes_its_input_and_equals_the_reference(index: int) -> None:
    golden = unit("fp8_gemm")
    codes, scale = golden[f"{index}.b"], raw(golden[f"{index}.b_scale"])
    weight = Fp8Weight(dequantize_fp8_weight(raw(codes), scale))
    x = golden[f"{index}.x"]
    got, want, exact = linear_fp8(x, weight), golden[f"{index}.out"], golden[f"{index}.exact"]
    assert torch.equal(want, exact.to(torch.bfloat16))
    # Adding up K numbers in fp32 errs by about sqrt(K) roundings of the magnitudes. Where that
    # decides whether bf16 rounds up or down, the order in which a processor adds does.
    assert weight.dequantized is not None
    magnitudes = round_trip_fp8(x).double().abs() @ weight.dequantized.double().abs().T
    slack = magnitudes * x.shape[-1] ** 0.5 * 2.0**-24
    down, up = (exact - slack).to(torch.bfloat16), (exact + slack).to(torch.bfloat16)
    assert ((down <= got) & (got <= up)).all() and (down == up).double().mean() > 0.98


@pytest.mark.parametrize("index", range(3))
def test_fp4_product_equals_the_reference(index: int) -> None:
    golden = unit("fp4_gemm")
    packed, scale = raw(golden[f"{index}.b"]), raw(golden[f"{index}.b_scale"])
    got = linear(round_trip_fp8(golden[f"{index}.x"]), dequantize_fp4_weight(packed, scale))
    assert torch.equal(got, golden[f"{index}.out"])
    assert torch.equal(got, golden[f"{index}.exact"].to(torch.bfloat16))


@pytest.mark.parametrize("index", range(2))
def test_rms_norm_holds_a_tiny_eps(index: int) -> None:
    golden, eps = unit("rms_norm"), UNITS["rms_norm"]["params"][index]["eps"]
    got = rms_norm(golden[f"{index}.x"], golden[f"{index}.weight"].float(), eps)
    assert torch.equal(got, golden[f"{index}.out"])


@pytest.mark.parametrize("index", range(4))
def test_mixes_are_doubly_stochastic_as_in_the_reference(index: int) -> None:
    golden, params = unit("hc_split_sinkhorn"), UNITS["hc_split_sinkhorn"]["params"][index]
    raw_mixes, scale, base = (golden[f"{index}.{name}"] for name in ("mixes", "scale", "base"))
    got = hyper_connections.split_mixes(raw_mixes, scale, base, params["eps"], params["iters"])
    for name, value in got._asdict().items():
        error = (value - golden[f"{index}.{name}"]).abs().max().item()
        assert error <= 4e-7, f"{name}: {error:.1e}"


@pytest.mark.parametrize("index", range(3))
def test_gate_chooses_with_its_bias_and_weighs_without(index: int) -> None:
    golden, params = unit("gate"), UNITS["gate"]["params"][index]
    gate = GateWeights(golden[f"{index}.weight"].float(), golden[f"{index}.bias"])
    got = moe.route(golden[f"{index}.x"], gate, params["topk"], params["route_scale"])
    assert torch.equal(got.picks, golden[f"{index}.indices"])
    assert (got.weights - golden[f"{index}.weights"]).abs().max().item() <= 4e-7


@pytest.mark.parametrize("index", [0, 1])
def test_routed_expert_clamps_and_weighs_before_the_down_projection(index: int) -> None:
    golden, params = unit("expert"), UNITS["expert"]["params"][index]
    parts = [
        raw(golden[f"{index}.{matrix}.{part}"])
        for matrix in ("w1", "w3", "w2")
        for part in ("weight", "scale")
    ]
    got = moe.expert_product(
        quantized(golden[f"{index}.x"]),
        golden[f"{index}.route_weight"].float().squeeze(-1),
        ExpertBytes(*parts),
        params["swiglu_limit"],
    )
    assert bf16_steps_apart(got, golden[f"{index}.out"]).max().item() <= 1


@pytest.mark.parametrize("index", [2, 3])
def test_shared_expert_equals_the_reference(index: int) -> None:
    golden, params = unit("expert"), UNITS["expert"]["params"][index]
    w1, w3, w2 = (
        dequantize_fp8_weight(
            raw(golden[f"{index}.{name}.weight"]), raw(golden[f"{index}.{name}.scale"])
        )
        for name in ("w1", "w3", "w2")
    )
    weights = SharedExpertWeights(Fp8Weight(torch.cat([w1, w3])), Fp8Weight(w2))
    got = moe.shared_expert(quantized(golden[f"{index}.x"]), weights, params["swiglu_limit"])
    assert bf16_steps_apart(got, golden[f"{index}.out"]).max().item() <= 1


def random_expert(generator: torch.Generator, hidden: int, inner: int) -> ExpertBytes:
    def pair(rows: int, columns: int) -> list[torch.Tensor]:
        codes = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, (rows, columns // 32), generator=generator)
        return [codes, scales.to(torch.uint8)]

    return ExpertBytes(*pair(inner, hidden), *pair(inner, hidden), *pair(hidden, inner))


def arriving(experts: Iterable[tuple[int, ExpertBytes]]) -> moe.Arriving:
    return moe.Arriving((), np.empty((0, 6), dtype=np.int64), experts)


def test_order_of_arrival_never_shows_in_the_sum() -> None:
    generator = torch.Generator().manual_seed(7)
    experts = {e: random_expert(generator, 64, 32) for e in range(6)}
    x = torch.randn(9, 64, generator=generator).to(torch.bfloat16)
    picks = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(9)])
    routing = moe.Routing(picks, torch.rand(9, 3, generator=generator) * 100)
    config = replace(ModelConfig.load(MINI), swiglu_limit=10.0)
    counts = moe.pick_counts(routing, 6).tolist()
    needed = [e for e in range(6) if counts[e]]
    results = [
        moe.routed_experts(
            quantized(x), routing, counts, arriving((e, experts[e]) for e in order), config
        )
        for order in (needed, needed[::-1], needed[2:] + needed[:2])
    ]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    token = 4
    want = torch.zeros(64)
    for expert, place in sorted((e, i) for i, e in enumerate(picks[token].tolist())):
        weight = routing.weights[token, place : place + 1]
        row = quantized(x[token : token + 1])
        want += moe.expert_product(row, weight, experts[expert], 10.0)[0]
    assert torch.equal(results[0][token], want)
