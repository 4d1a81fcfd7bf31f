"""The routed experts of a chunk of tokens, as few launches as they come in.

Owns how picks are cut into tiles. Experts that lie on the device already go together; one that
arrives goes alone, as soon as it is there. Which tile takes a pick depends on how many tokens
picked each expert, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from compute.kernels import chunk_experts
from compute.kernels.chunk_experts import Tile
from compute.kernels.experts import ALIGNMENT
from compute.layers.moe import Arriving, Routing, by_expert
from compute.sources import Addresses, ExpertBytes
from protocol.config import ModelConfig


class Tiles(NamedTuple):
    """Those of the two products; both take the same number of picks."""

    gate_up: Tile
    down: Tile


def tiles_for(picks: int, experts: int) -> Tiles:
    """The tiles for so many picks of so many experts, by how many an expert has on average."""
    if picks <= 16 * experts:
        return Tiles(Tile(64, 16, 4, 4), Tile(64, 16, 4, 4))
    if picks <= 64 * experts:
        return Tiles(Tile(64, 64, 3, 4), Tile(64, 64, 3, 4))
    return Tiles(Tile(128, 128, 3, 8), Tile(128, 128, 3, 8))


def routed_experts(
    x: torch.Tensor,
    routing: Routing,
    counts: Sequence[int],
    arriving: Arriving,
    config: ModelConfig,
    *,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """As `compute.layers.moe.routed_experts`, for bf16 `x`."""
    picks, hidden = routing.picks.numel(), x.shape[1]
    intermediate = config.moe_intermediate_size
    order, weights = by_expert(routing)
    order, vectors = order.to(torch.int32), chunk_experts.interleaved(x)
    tiles = tiles or tiles_for(picks, sum(count > 0 for count in counts))
    # Where columns are missing of 128 the product takes zeros.
    width = -(-intermediate // chunk_experts.DEPTH) * chunk_experts.DEPTH
    fresh = torch.empty if width == intermediate else torch.zeros
    inner = fresh((picks, width), dtype=torch.bfloat16, device=x.device)
    outputs = torch.empty((picks, hidden), dtype=torch.bfloat16, device=x.device)
    ends = np.array([0, *accumulate(counts)])

    def multiply(experts: Sequence[int], addresses: Addresses) -> None:
        there = np.asarray(experts, dtype=np.int64)
        work = _work(addresses, ends[there], ends[there + 1], tiles.down.picks)
        held = _uploaded(work, x.device)
        chunk_experts.gate_up(
            vectors, held, order, weights, inner, intermediate=intermediate, hidden=hidden,
            limit=config.swiglu_limit, tile=tiles.gate_up,
        )  # fmt: skip
        chunk_experts.down(inner, held, order, outputs, intermediate=intermediate, tile=tiles.down)

    if arriving.present:
        multiply(arriving.present, arriving.addresses)
    for expert, parts in arriving.others:
        aligned = _aligned(parts)
        multiply([expert], np.array([[part.data_ptr() for part in aligned]]))
    total = torch.empty_like(x, dtype=torch.float32)
    chunk_experts.sum_picks(outputs, total)
    return total


def _work(addresses: Addresses, begins: Addresses, ends: Addresses, size: int) -> Addresses:
    """int64 [tiles, 8] as `chunk_experts.gate_up` takes it: picks begins..ends of each expert at
    `addresses` [n, 6], cut into `size` at most."""
    tiles = -(-(ends - begins) // size)
    expert = np.repeat(np.arange(len(tiles)), tiles)
    number = np.arange(len(expert)) - np.repeat(tiles.cumsum() - tiles, tiles)
    first = begins[expert] + number * size
    last = np.minimum(first + size, ends[expert])
    return np.concatenate((addresses[expert], first[:, None], last[:, None]), 1)


def _uploaded(work: Addresses, device: torch.device) -> torch.Tensor:
    held = torch.from_numpy(work)
    # From pinned memory, so that the host need not wait for what was launched before.
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held


def _aligned(expert: ExpertBytes) -> ExpertBytes:
    """`expert`, its tensors copied where a shard's header leaves them at odd addresses."""
    return ExpertBytes(
        *(part if part.data_ptr() % ALIGNMENT == 0 else part.clone() for part in expert)
    )
