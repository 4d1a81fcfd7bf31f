"""Routed experts of many tokens against float64, and grouping that must never show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from compute.formats import dequantize_fp4_weight, round_trip_fp8
from compute.kernels import chunk_experts, grouped_experts
from compute.kernels.chunk_experts import Tile
from compute.kernels.grouped_experts import TILES, Tiles, tiles_of
from compute.layers import moe
from compute.sources import ExpertBytes
from protocol.config import ModelConfig
from tests.compute.kernels.comparing import (
    DEVICE,
    assert_close,
    assert_same_bf16,
    assert_same_grid,
    fp4_weight,
)
from tests.golden.cases import MINI

gpu = pytest.mark.gpu
CONFIG = ModelConfig.load(MINI)
SMALL = Tiles(Tile(64, 16, 2, 2), Tile(32, 16, 2, 1))
# The limit that clamps nothing and one that does.
LIMITS = [(size, 10.0 if number % 2 else 0.5) for number, size in enumerate(TILES)]


def wide(*values: object) -> object:
    return pytest.param(*values, marks=gpu)


def expert(hidden: int, intermediate: int) -> ExpertBytes:
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return ExpertBytes(*(part.to(DEVICE) for shape in shapes for part in fp4_weight(*shape)))


def vectors(tokens: int, width: int) -> torch.Tensor:
    return round_trip_fp8((torch.randn(tokens, width) * 3).to(torch.bfloat16)).to(DEVICE)


def routing(tokens: int, k: int, experts: Sequence[int]) -> moe.Routing:
    """Random picks of `experts`, the first one by token 0 alone."""
    common = torch.tensor(experts[1:])
    picks = torch.stack([common[torch.randperm(len(common))[:k]] for _ in range(tokens)])
    picks[0, -1] = experts[0]
    return moe.Routing(picks.to(DEVICE), (torch.rand(tokens, k) + 0.1).to(DEVICE))


def weight(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return dequantize_fp4_weight(packed, scales).double()


def straight(interleaved: torch.Tensor, width: int) -> torch.Tensor:
    """The columns of what `chunk_experts.interleaved` made, in their own order."""
    order = chunk_experts.interleaved(torch.arange(128.0, device=DEVICE)[None])[0].long()
    blocks = interleaved.unflatten(1, (-1, 128))
    return torch.empty_like(blocks).index_copy_(2, order, blocks).flatten(1)[:, :width]


def work_of(counts: Sequence[int], held: Sequence[ExpertBytes], size: int) -> torch.Tensor:
    ends = np.cumsum([0, *counts])
    addresses = np.array([[part.data_ptr() for part in parts] for parts in held])
    return torch.from_numpy(tiles_of(addresses, ends[:-1], ends[1:], [size])[0]).to(DEVICE)


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "hidden", "intermediate", "limit", "tiles"),
    [
        (9, 2, 4, 160, 96, 0.5, SMALL),  # columns and rows that fill no block of 128
        (1, 1, 2, 128, 64, 10.0, SMALL),
        *(wide(200, 6, 9, 5120, 2304, limit, TILES[size]) for size, limit in LIMITS),
        *(wide(50, 3, 5, 160, 96, limit, TILES[size]) for size, limit in LIMITS),
    ],
)
def test_products_from_packed_bytes_are_exact_sums_rounded_once(
    tokens: int, k: int, experts: int, hidden: int, intermediate: int, limit: float, tiles: Tiles
) -> None:
    held = [expert(hidden, intermediate) for _ in range(experts)]
    x, chosen = vectors(tokens, hidden), routing(tokens, k, range(experts))
    order, weights = moe.by_expert(chosen)
    counts = moe.pick_counts(chosen, experts).tolist()
    work = work_of(counts, held, tiles.down.picks)
    width = -(-intermediate // 128) * 128
    inner = torch.full((tokens * k, width), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    inner[:, chunk_experts.interleaved(torch.ones(1, intermediate))[0] == 0] = 0
    out = torch.full((tokens * k, hidden), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    chunk_experts.gate_up(
        chunk_experts.interleaved(x)[order // k], work, weights[order], inner,
        intermediate=intermediate, hidden=hidden, limit=limit, tile=tiles.gate_up,
    )  # fmt: skip
    chunk_experts.down(inner, work, order.int(), out, intermediate=intermediate, tile=tiles.down)
    got = straight(inner, intermediate)
    for places, values, parts in zip(order.split(counts), got.split(counts), held, strict=True):
        if len(places) == 0:
            continue
        rows = x[places // k].double()
        gate, up = ((rows @ weight(*of).T).to(torch.bfloat16) for of in (parts[0:2], parts[2:4]))
        want = moe.swiglu(gate, up, limit) * weights[places].unsqueeze(1)
        assert_same_grid(values, round_trip_fp8(want.to(torch.bfloat16)))
        product = values.double() @ weight(*parts[4:6]).T
        assert_same_bf16(out[places], product.to(torch.bfloat16), differing=3e-3)
    total = torch.full((tokens, hidden), float("nan"), device=DEVICE)
    chunk_experts.sum_picks(out, total)
    in_order = out.view(tokens, k, hidden)[:, 0].float()
    for place in range(1, k):
        in_order += out.view(tokens, k, hidden)[:, place]
    assert torch.equal(total, in_order)


def displaced(parts: ExpertBytes) -> ExpertBytes:
    """`parts` where a shard whose header is a multiple of 8 only leaves them."""
    moved = []
    for part in parts:
        room = torch.empty(part.numel() + 8, dtype=torch.uint8, device=part.device)
        moved.append(room[8:].view(part.shape).copy_(part))
    return ExpertBytes(*moved)


def arriving(
    held: dict[int, ExpertBytes], present: Sequence[int], others: Sequence[int]
) -> moe.Arriving:
    addresses = [[part.data_ptr() for part in held[e]] for e in present]
    return moe.Arriving(
        present,
        np.array(addresses, dtype=np.int64).reshape(-1, 6),
        [(e, displaced(held[e])) for e in others],
    )


@pytest.mark.parametrize(
    ("tokens", "k", "hidden", "intermediate", "sizes"),
    [
        (5, 2, 128, 64, {16: Tiles(Tile(128, 16, 2, 2), Tile(128, 16, 2, 4))}),
        wide(11, 3, 128, 64, TILES),
        wide(1, 2, 5120, 2304, TILES),
        wide(300, 6, 5120, 2304, TILES),
    ],
)
def test_where_experts_lie_and_when_they_come_never_shows_in_a_bit(
    tokens: int, k: int, hidden: int, intermediate: int, sizes: dict[int, Tiles]
) -> None:
    # 0 is picked once, 3 never.
    ids = [0, 1, 2, 4, 5, 6, 7, 8][: k + 2]
    config = replace(
        CONFIG, n_routed_experts=9, hidden_size=hidden, moe_intermediate_size=intermediate
    )
    held = {e: expert(hidden, intermediate) for e in ids}
    x, chosen = vectors(tokens, hidden), routing(tokens, k, ids)
    counts = moe.pick_counts(chosen, 9).tolist()
    needed = [e for e in range(9) if counts[e]]
    assert counts[3] == 0 and counts[0] == 1
    ways = (needed[:-1], needed[-1:]), (needed[1:2], [needed[0], *needed[:1:-1]]), ([], needed)
    results = [
        grouped_experts.routed_experts(x, chosen, counts, arriving(held, *way), config, sizes=sizes)
        for way in ways
    ]
    assert all(torch.equal(results[0], result) for result in results[1:])
    on_cpu = moe.Routing(*(part.cpu() for part in chosen))
    there = {e: ExpertBytes(*(part.cpu() for part in parts)) for e, parts in held.items()}
    want = moe.routed_experts(x.cpu().float(), on_cpu, counts, arriving(there, [], needed), config)
    assert_close(results[0].cpu(), want, 2e-3)


def test_every_pick_lies_in_one_tile_and_few_tiles_of_a_size_join_larger_ones() -> None:
    counts = [1, 0, 16, 17, 128, 129, 300, *[20] * 8]
    ends = np.cumsum([0, *counts])
    addresses = np.arange(6 * len(counts)).reshape(-1, 6)
    work, lengths = tiles_of(addresses, ends[:-1], ends[1:], [16, 32, 128])
    # Of 16: 1, 16 and what is left of 129; of 32: 17 and eight of 20.
    assert lengths == [0, 12, 5]
    tiles = [(first, last, six[0] // 6) for *six, first, last in work.tolist()]
    assert all(last - first <= 32 for first, last, _ in tiles[:12])
    assert all(32 < last - first <= 128 for first, last, _ in tiles[12:])
    tiles.sort()
    assert [first for first, _, _ in tiles] == [0, *(last for _, last, _ in tiles[:-1])]
    assert all(ends[e] <= first < last <= ends[e + 1] for first, last, e in tiles)
    assert tiles[-1][1] == sum(counts)


@pytest.mark.parametrize("seed", range(20))
def test_few_tiles_that_join_others_which_are_few_themselves_are_counted_twice(seed: int) -> None:
    random, sizes = np.random.default_rng(seed), [16, 32, 64, 128]
    counts = random.integers(0, 200, int(random.integers(1, 40)))
    ends = np.cumsum([0, *counts])
    addresses = np.zeros((len(counts), 6), dtype=np.int64)
    work, lengths = tiles_of(addresses, ends[:-1], ends[1:], sizes)
    assert sum(lengths) == len(work)
    picks = work[:, 7] - work[:, 6]
    assert picks.sum() == sum(counts)
    assert (picks <= np.repeat(sizes, lengths)).all()
