"""The routed experts of a chunk of tokens, as few launches as they come in.

Owns how picks are cut into tiles. Experts that lie on the device already go together; one that
arrives goes alone, as soon as it is there. An element's sum is made in the same order in a tile of
any size, so none of this shows in a bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


#: By picks. Measured on an H200 (`docs/kernels.md`).
TILES = {
    16: Tiles(Tile(128, 16, 4, 4), Tile(128, 16, 4, 4)),
    32: Tiles(Tile(128, 32, 3, 4), Tile(128, 32, 3, 4)),
    64: Tiles(Tile(128, 64, 3, 4), Tile(128, 64, 3, 4)),
    128: Tiles(Tile(64, 128, 2, 4), Tile(128, 128, 2, 8)),
}
# Fewer tiles of a size than these are not worth launches of their own.
LEAST_TILES = 8


def routed_experts(
    x: torch.Tensor,
    routing: Routing,
    counts: Sequence[int],
    arriving: Arriving,
    config: ModelConfig,
    *,
    sizes: Mapping[int, Tiles] = TILES,
) -> torch.Tensor:
    """As `compute.layers.moe.routed_experts`, for bf16 `x`; `sizes` are tiles by their picks."""
    picks, hidden = routing.picks.numel(), x.shape[1]
    intermediate = config.moe_intermediate_size
    order, weights = by_expert(routing)
    # Side by side as experts want them, so that the copy engine fetches a tile's.
    vectors = chunk_experts.interleaved(x)[order // routing.picks.shape[1]]
    weights, order = weights[order], order.to(torch.int32)
    # Where columns are missing of 128 the product takes zeros.
    width = -(-intermediate // chunk_experts.DEPTH) * chunk_experts.DEPTH
    fresh = torch.empty if width == intermediate else torch.zeros
    inner = fresh((picks, width), dtype=torch.bfloat16, device=x.device)
    outputs = torch.empty((picks, hidden), dtype=torch.bfloat16, device=x.device)
    ends = np.cumsum([0, *counts])

    def multiply(experts: Sequence[int], addresses: Addresses) -> None:
        which = np.asarray(experts)
        work, lengths = tiles_of(addresses, ends[which], ends[which + 1], list(sizes))
        held = _uploaded(work, x.device).split(lengths)
        for tiles, some in zip(sizes.values(), held, strict=True):
            if len(some) == 0:
                continue
            chunk_experts.gate_up(
                vectors, some, weights, inner, intermediate=intermediate, hidden=hidden,
                limit=config.swiglu_limit, tile=tiles.gate_up,
            )  # fmt: skip
            chunk_experts.down(
                inner, some, order, outputs, intermediate=intermediate, tile=tiles.down
            )

    if arriving.present:
        multiply(arriving.present, arriving.addresses)
    for expert, parts in arriving.others:
        aligned = _aligned(parts)
        multiply([expert], np.array([[part.data_ptr() for part in aligned]]))
    total = torch.empty_like(x, dtype=torch.float32)
    chunk_experts.sum_picks(outputs, total)
    return total


def tiles_of(
    addresses: Addresses, begins: Addresses, ends: Addresses, sizes: Sequence[int]
) -> tuple[Addresses, list[int]]:
    """Picks `begins`..`ends` [n] of the experts at `addresses` [n, 6], cut into tiles of `sizes`,
    which ascend.

    int64 [tiles, 8] as `chunk_experts.gate_up` takes them, and how many there are of each size, in
    whose order they lie. An expert's picks fill tiles of the largest size and one that fits.
    """
    tiles = -(-(ends - begins) // sizes[-1])
    expert = np.repeat(np.arange(len(tiles)), tiles)
    number = np.arange(len(expert)) - np.repeat(tiles.cumsum() - tiles, tiles)
    first = begins[expert] + number * sizes[-1]
    last = np.minimum(first + sizes[-1], ends[expert])
    of_size = np.searchsorted(sizes, last - first)
    lengths = np.bincount(of_size, minlength=len(sizes)).tolist()
    for size in range(len(sizes) - 1):
        larger = next((other for other in range(size + 1, len(sizes)) if lengths[other]), None)
        # What smaller sizes handed on counts too.
        if larger is not None and lengths[size] < LEAST_TILES:
            of_size[of_size == size] = larger
            lengths[larger] += lengths[size]
            lengths[size] = 0
    work = np.concatenate((addresses[expert], first[:, None], last[:, None]), 1)
    return work[of_size.argsort(kind="stable")], lengths


def _uploaded(work: Addresses, device: torch.device) -> torch.Tensor:
    held = torch.from_numpy(work)
    # From pinned memory, so that the host need not wait for what was launched before.
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held


def _aligned(expert: ExpertBytes) -> ExpertBytes:
    """`expert`, its tensors copied where a shard's header leaves them at odd addresses."""
    return ExpertBytes(
        *(part if part.data_ptr() % ALIGNMENT == 0 else part.clone() for part in expert)
    )
