"""Norms, streams, router and attention against the torch reference and the recorded units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compute.kernels import attention, begin, hyper_connections, norms, reference, router
from compute.rope import frequencies, rotation
from tests.compute.kernels.comparing import (
    DEVICE,
    assert_close,
    assert_same_bf16,
    assert_same_grid,
    empty_limbs,
    poisoned,
    run_both,
)

UNITS = Path(__file__).parents[2] / "golden" / "data" / "units"
FP32 = torch.float32
gpu = pytest.mark.gpu


def wide(*values: object) -> object:
    return pytest.param(*values, marks=gpu)


@pytest.mark.parametrize(("tokens", "width"), [(3, 160), (1, 32), wide(4, 5120), wide(1, 1280)])
def test_norm_and_its_rounding_match(tokens: int, width: int) -> None:
    x = (torch.randn(tokens, width) * 7).to(torch.bfloat16)
    got, want = run_both(
        norms.rms_norm, reference.rms_norm, x, torch.rand(width),
        poisoned(tokens, width), poisoned(tokens, width), empty_limbs(tokens, width), eps=1e-20,
    )  # fmt: skip
    assert_same_bf16(got[2], want[2])
    assert_same_grid(got[3], want[3])
    # The limbs stand for what the round trip gives, bit for bit.
    assert torch.equal(reference.values_of(got[4]), got[3].float())
    rounded, limbs = got[3], got[4]
    got, want = run_both(
        norms.quantize, reference.quantize,
        got[2], poisoned(tokens, width), empty_limbs(tokens, width),
    )  # fmt: skip
    assert torch.equal(got[1], want[1])
    for part, same, wanted in zip(got[2], limbs, want[2], strict=True):
        assert torch.equal(part, wanted)
        assert torch.equal(part, same)
    assert torch.equal(got[1], rounded)


@pytest.mark.parametrize(
    ("splits", "tokens", "latent", "head_dim", "rotated"),
    [(3, 2, 96, 64, 32), (1, 1, 64, 96, 16), wide(4, 1, 1280, 512, 64), wide(2, 6, 1280, 512, 64)],
)
def test_query_latent_and_window_row_match(
    splits: int, tokens: int, latent: int, head_dim: int, rotated: int
) -> None:
    turn = rotation(torch.arange(tokens) + 70, frequencies(rotated, 1e4, None))
    slots = (torch.randperm(tokens + 3)[:tokens]).int()
    got, want = run_both(
        norms.finish_query_kv, reference.finish_query_kv,
        torch.randn(splits, tokens, latent + head_dim), torch.rand(latent), torch.rand(head_dim),
        turn.cos, turn.sin, slots, poisoned(tokens, latent), torch.zeros(tokens + 3,
        head_dim).bfloat16(), eps=1e-20,
    )  # fmt: skip
    assert_same_grid(got[6], want[6])
    assert_same_grid(got[7], want[7])


@pytest.mark.parametrize("case", range(4))
def test_sinkhorn_finish_matches_the_recorded_units(case: int) -> None:
    iterations, eps = [(20, 1e-6), (12, 1e-5), (20, 1e-6), (1, 1e-6)][case]
    units = load_file(UNITS / "hc_split_sinkhorn.safetensors")
    mixes = units[f"{case}.mixes"]
    tokens, width = mixes.shape[0], 80
    # Shares that add up to the recorded mixes, under squares that make the divisor one.
    sums = torch.zeros(3, tokens, hyper_connections.SUMS)
    sums[:, :, : mixes.shape[1]] = mixes * torch.tensor([0.25, 0.5, 0.25]).view(3, 1, 1)
    sums[0, :, mixes.shape[1]] = width
    out = [poisoned(tokens, *shape, dtype=FP32).to(DEVICE) for shape in ((4,), (4,), (4, 4))]
    hyper_connections.mix_finish(
        sums.to(DEVICE), units[f"{case}.scale"].to(DEVICE), units[f"{case}.base"].to(DEVICE), *out,
        width=width, iterations=iterations, norm_eps=0.0, eps=eps,
    )  # fmt: skip
    for name, got in zip(("pre", "post", "comb"), out, strict=True):
        assert (got.cpu() - units[f"{case}.{name}"]).abs().max() <= 5e-7, name


@pytest.mark.parametrize(("tokens", "width"), [(1, 160), (9, 96), wide(1, 5120), wide(11, 5120)])
def test_mixes_of_streams_match(tokens: int, width: int) -> None:
    streams = torch.randn(tokens, 4, width).to(torch.bfloat16)
    matrix = torch.randn(24, 4 * width) / (4 * width) ** 0.5
    sums = poisoned(
        hyper_connections.mix_splits(4 * width), tokens, hyper_connections.SUMS, dtype=FP32
    )
    got, want = run_both(hyper_connections.mix_dot, reference.mix_dot, streams, matrix, sums)
    total = got[2].double().sum(0)[:, :25]
    assert_close(total, want[2].double().sum(0)[:, :25], 1e-6)
    shape = [poisoned(tokens, *s, dtype=FP32) for s in ((4,), (4,), (4, 4))]
    got, want = run_both(
        hyper_connections.mix_finish, reference.mix_finish,
        want[2], torch.rand(3), torch.randn(24), *shape,
        width=4 * width, iterations=20, norm_eps=1e-20, eps=1e-6,
    )  # fmt: skip
    for position in (3, 4, 5):
        assert (got[position] - want[position]).abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("tokens", "parts", "extra", "width"),
    [(2, 3, True, 72), (1, 1, False, 300), wide(1, 6, True, 5120)],
)
def test_put_back_adds_parts_in_order(tokens: int, parts: int, extra: bool, width: int) -> None:
    streams = (torch.randn(tokens, 4, width) * 10).to(torch.bfloat16)
    added = torch.randn(tokens, width).to(torch.bfloat16) if extra else None
    got, want = run_both(
        hyper_connections.post, reference.post,
        torch.randn(tokens, parts, width).to(torch.bfloat16), added, streams,
        torch.rand(tokens, 4), torch.rand(tokens, 4, 4), torch.rand(tokens, 4), poisoned(tokens,
        width), )  # fmt: skip
    assert_same_bf16(got[2], want[2])
    assert_same_bf16(got[6], want[6])


@pytest.mark.parametrize(
    ("splits", "tokens", "experts", "picks"), [(3, 4, 16, 3), (1, 2, 24, 4), wide(10, 7, 384, 6)]
)
def test_router_picks_by_biased_score_and_weighs_without_it(
    splits: int, tokens: int, experts: int, picks: int
) -> None:
    logits = torch.randn(splits, tokens, experts) * 4
    logits[:, 0] = 0.0  # every score equal: the bias alone chooses
    got, want = run_both(
        router.route, reference.route, logits, torch.randn(experts),
        poisoned(tokens, picks, dtype=torch.int32), poisoned(tokens, picks, dtype=FP32),
        scaling=1.5,
    )  # fmt: skip
    assert torch.equal(got[2], want[2])
    assert_close(got[3], want[3], 1e-6)


@pytest.mark.parametrize(("tokens", "experts", "picks"), [(2, 16, 3), wide(1, 384, 6)])
def test_router_finds_its_picks_and_leaves_zeros_for_the_absent(
    tokens: int, experts: int, picks: int
) -> None:
    slots = torch.randperm(2 * experts)[:experts].int()
    slots[torch.rand(experts) < 0.3] = -1
    first = torch.randint(1 << 33, 1 << 47, (6,))
    table = poisoned(tokens * picks, 6, dtype=torch.int64)
    got, want = run_both(
        router.route, reference.route, torch.randn(2, tokens, experts), torch.randn(experts),
        poisoned(tokens, picks, dtype=torch.int32), poisoned(tokens, picks, dtype=FP32), None,
        router.Lookup(slots, first, table, 18_800_640), scaling=1.5,
    )  # fmt: skip
    assert torch.equal(got[2], want[2])
    found, ids = got[5].table, got[2].flatten().long()
    assert torch.equal(found, want[5].table)
    assert torch.equal((found == 0).all(1), slots[ids] < 0)
    lies = slots[ids].long()
    assert ((found - first)[lies >= 0] == lies[lies >= 0, None] * 18_800_640).all()


def test_router_gives_equal_scores_to_the_lowest_ids() -> None:
    ids, weights = (
        poisoned(1, 3, dtype=torch.int32).to(DEVICE),
        poisoned(1, 3, dtype=FP32).to(DEVICE),
    )
    router.route(
        torch.zeros(1, 1, 9, device=DEVICE),
        torch.zeros(9, device=DEVICE),
        ids,
        weights,
        scaling=1.5,
    )
    assert ids.tolist() == [[0, 1, 2]]
    assert_close(weights.cpu(), torch.full((1, 3), 0.5), 1e-6)


@pytest.mark.parametrize("case", range(3))
def test_router_scores_match_the_recorded_units(case: int) -> None:
    units = load_file(UNITS / "gate.safetensors")
    indices = units[f"{case}.indices"]
    x, weight, bias = (units[f"{case}.{n}"] for n in ("x", "weight", "bias"))
    logits = (x.double() @ weight.double().T).float()
    ids = poisoned(*indices.shape, dtype=torch.int32).to(DEVICE)
    weights = poisoned(*indices.shape, dtype=FP32).to(DEVICE)
    scaling = [2.5, 1.5, 1.5][case]
    router.route(logits.unsqueeze(0).to(DEVICE), bias.to(DEVICE), ids, weights, scaling=scaling)
    ascending = indices.sort(-1)
    assert torch.equal(ids.cpu().long(), ascending.values)
    recorded = units[f"{case}.weights"].gather(1, ascending.indices)
    assert (weights.cpu() - recorded).abs().max() <= 1e-6


def attention_arguments(
    tokens: int, heads: int, width: int, rotated: int, window: int, chosen: int
) -> list[Any]:
    turn = rotation(torch.arange(tokens) + 500, frequencies(rotated, 1e4, None))
    rows = chosen + 40
    scratch = attention.AttentionScratch.empty(
        tokens, window + chosen, heads, width, torch.device("cpu")
    )
    for part in scratch:
        part.fill_(float("nan"))
    window_index = torch.randint(-1, window, (tokens, window)).int()
    chosen_index = torch.randint(-1, rows, (tokens, chosen)).int()
    if tokens > 1:  # a query that sees nothing at all, and one whose first block is empty
        window_index[0], chosen_index[0] = -1, -1
        window_index[1, :64] = -1
    return [
        torch.randn(tokens, heads, width).to(torch.bfloat16), turn.cos, turn.sin,
        torch.randn(window, width).to(torch.bfloat16), window_index,
        torch.randn(rows, width).to(torch.bfloat16), chosen_index,
        torch.randn(heads), poisoned(tokens, heads, width), scratch,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rotated", "window", "chosen"),
    [
        (2, 4, 64, 32, 16, 70),
        (1, 18, 96, 16, 70, 0),
        wide(1, 64, 512, 64, 128, 512),
        wide(3, 64, 512, 64, 128, 300),
    ],
)
def test_attention_over_window_and_chosen_rows_matches(
    tokens: int, heads: int, width: int, rotated: int, window: int, chosen: int
) -> None:
    arguments = attention_arguments(tokens, heads, width, rotated, window, chosen)
    got, want = run_both(attention.attend, reference.attend, *arguments)
    # A score on the edge of rounding a probability moves a few outputs by one step; what is rotated
    # after its rounding, by a step of the larger of its pair.
    pairs = want[8].unflatten(-1, (-1, 2)).abs().amax(-1, keepdim=True)
    larger = pairs.expand(*pairs.shape[:-1], 2).flatten(-2)
    assert_same_bf16(got[8], want[8], differing=5e-3, size=larger)
    assert_close(got[8], want[8], 3e-4)
    if tokens > 1:
        assert (got[8][0] == 0).all()


@pytest.mark.parametrize("case", range(3))
def test_attention_stays_near_the_recorded_units(case: int) -> None:
    units = load_file(UNITS / "sparse_attn.safetensors")
    q, kv, idx = (units[f"{case}.{n}"][0] for n in ("q", "kv", "idx"))
    tokens, heads, width = q.shape
    window = min(idx.shape[1], 64)
    out = poisoned(tokens, heads, width).to(DEVICE)
    scratch = attention.AttentionScratch.empty(tokens, idx.shape[1], heads, width, DEVICE)
    attention.attend(
        q.to(DEVICE), torch.ones(tokens, 8, device=DEVICE), torch.zeros(tokens, 8, device=DEVICE),
        kv.to(DEVICE), idx[:, :window].contiguous().to(DEVICE),
        kv.to(DEVICE), idx[:, window:].contiguous().to(DEVICE),
        units[f"{case}.sink"].to(DEVICE), out, scratch,
    )  # fmt: skip
    assert_same_bf16(out.cpu(), units[f"{case}.out"][0], differing=2e-3)
    # The recorded result is this far from the exact one too: probabilities are rounded.
    assert_close(out.cpu(), units[f"{case}.exact"][0], 4e-3)


@pytest.mark.parametrize(
    ("splits", "experts", "count", "top_k"),
    [(3, 16, 2, 3), (1, 24, 8, 4), wide(10, 384, 6, 6)],
)
def test_prediction_names_the_best_experts_and_their_margins(
    splits: int, experts: int, count: int, top_k: int
) -> None:
    # Both gates' logits come from one product.
    logits = torch.randn(splits, 1, 2 * experts) * 4
    bias = torch.randn(2, experts)
    gate, following = logits[:, :, :experts], logits[:, :, experts:]
    prediction = router.Prediction(
        following, bias[1], poisoned(count, dtype=torch.int32), poisoned(count, dtype=FP32)
    )
    got, want = run_both(
        router.route, reference.route, gate, bias[0],
        poisoned(1, top_k, dtype=torch.int32), poisoned(1, top_k, dtype=FP32), prediction,
        scaling=1.5,
    )  # fmt: skip
    assert torch.equal(got[2], want[2])
    assert_close(got[3], want[3], 1e-6)
    assert torch.equal(got[4].ids, want[4].ids)
    assert_close(got[4].margins, want[4].margins, 2e-6)


@pytest.mark.parametrize("position", [0, 5, 15, 16, 1001, 1_048_575])
def test_a_token_begins_with_its_embedding_and_what_its_position_says(position: int) -> None:
    width, hc, window, pairs = 96, 4, 16, 16
    plain, yarn = frequencies(2 * pairs, 1e4, None), frequencies(2 * pairs, 1.6e5, None)
    got, want = run_both(
        begin.begin_token, reference.begin_token,
        torch.tensor([3]), torch.tensor([position]), torch.randn(5, width).to(torch.bfloat16),
        plain, yarn, torch.tensor([1, 2, 128]),
        poisoned(1, hc, width), poisoned(1, width), poisoned(1, hc, dtype=FP32),
        poisoned(5, pairs, dtype=FP32), poisoned(5, pairs, dtype=FP32),
        poisoned(1, dtype=torch.int32), poisoned(1, window, dtype=torch.int32),
        poisoned(3, dtype=torch.int32),
    )  # fmt: skip
    for place in (6, 7, 8, 11, 12, 13):
        assert torch.equal(got[place], want[place])
    for place in (9, 10):
        assert (got[place] - want[place]).abs().max() <= 2e-7
