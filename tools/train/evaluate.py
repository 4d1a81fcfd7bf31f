"""Held-out loss of a model in the training code.

Owns what "bits per byte" means: the held-out documents as one stream, cut into pieces without
overlap, each after a BOS; the bits of all tokens over the bytes their texts have (special tokens
have none).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engram_io.token_map import read_tokenizer
from tools.train import tokens
from tools.train.dense import Dense
from tools.train.model import Model, losses
from tools.train.tokenizer import bytes_per_id

# A launch costs a GPU more than a few sequences do; a CPU wants the smaller working set.
SEQUENCES = {"cuda": 32, "cpu": 8}


@torch.no_grad()
def _nats(model: Model | Dense, pieces: npt.NDArray[np.int64]) -> tuple[float, list[torch.Tensor]]:
    """Loss in nats over all tokens, and of a `Model` each batch's expert loads [layers, E]."""
    device = next(model.parameters()).device
    model.eval()
    nats, loads = 0.0, []
    for group in np.array_split(pieces, -(-len(pieces) // SEQUENCES[device.type])):
        batch = torch.from_numpy(group).to(device)
        done = model(batch[:, :-1])
        hidden = done.hidden if isinstance(model, Model) else done
        found = losses(hidden.flatten(0, 1), model.head.weight, batch[:, 1:].flatten())
        nats += float(found.double().sum())
        if isinstance(model, Model):
            loads.append(torch.stack([moe.load for moe in model.moes()]))
    model.train()
    return nats, loads


def bits_per_byte(
    model: Model | Dense, data: Path, length: int, most_pieces: int | None = None
) -> dict[str, Any]:
    """`bits_per_byte`, `nats_per_token` and how much text; the expert shares of a `Model` too."""
    config = model.config
    widths = torch.tensor(bytes_per_id(read_tokenizer(data / "tokenizer.json")))
    stream = tokens.load(data / "held_out.tokens.xz")
    pieces = tokens.held_out_pieces(stream, length, config.bos_token_id)[:most_pieces]
    nats, shares = _nats(model, pieces)
    wanted = torch.from_numpy(pieces[:, 1:])
    size = int(widths[wanted].sum())
    result: dict[str, Any] = {
        "bits_per_byte": nats / math.log(2) / size,
        "nats_per_token": nats / wanted.numel(),
        "tokens": wanted.numel(),
        "bytes": size,
    }
    if shares:
        fair = torch.stack(shares).mean(0) * config.n_routed_experts
        result["least_expert_share"] = float(fair.min())
        result["most_expert_share"] = float(fair.max())
    return result
