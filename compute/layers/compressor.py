"""The compressor of a kv source layer: groups of tokens become rows that later layers read.

Owns the arithmetic of latents, compressed rows and index keys, and the rule that a group which is
not full waits for the next pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compute.formats import round_trip_fp4_index, round_trip_fp4_kv
from compute.layers.linear import linear
from compute.layers.norm import rms_norm
from compute.rope import Rope, Rotation, rotate_tail
from compute.sequence import SequenceState
from compute.weights import CompressorWeights, IndexerWeights
from protocol.config import ModelConfig


def pool_groups(kv: torch.Tensor, gate: torch.Tensor, ratio: int) -> torch.Tensor:
    """bf16 [n, D]: sum over each group of `ratio` tokens of kv * softmax(gate), per channel.

    `kv`, `gate` fp32 [n * ratio, D].
    """
    weights = gate.view(-1, ratio, gate.shape[-1]).softmax(1)
    return (kv.view_as(weights) * weights).sum(1).to(torch.bfloat16)


def compressed_rows(latent: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """bf16 [n, head_dim]: latents rotated at their group's first position, on the fp4 grid."""
    return round_trip_fp4_kv(rotate_tail(latent, turn))


def index_keys(
    latent: torch.Tensor, turn: Rotation, wk: torch.Tensor, k_norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """bf16 [n, index_head_dim] of latents BEFORE their rotation, rotated and on the fp4 grid."""
    keys = rms_norm(linear(latent, wk), k_norm, eps)
    return round_trip_fp4_index(rotate_tail(keys, turn))


class Compressor:
    """Extends the compressed KV and index keys of kv source `layer`."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: CompressorWeights,
        indexer: IndexerWeights,
        rope: Rope,
    ) -> None:
        assert indexer.wk is not None and indexer.k_norm is not None
        self._layer = layer
        self._ratio = config.compress_ratios[layer]
        self._eps = config.rms_norm_eps
        self._weights = weights
        self._wk, self._k_norm = indexer.wk, indexer.k_norm
        self._rope = rope

    def extend(self, x: torch.Tensor, start: int, state: SequenceState) -> torch.Tensor:
        """Take in bf16 `x` [T, D], the tokens from position `start`; the new latents [n, head_dim].

        n is the number of groups that these tokens complete, possibly 0.
        """
        pooled = self._pooled(x, start, state)
        latent = rms_norm(pooled, self._weights.norm, self._eps)
        rows = state.compressed[self._layer]
        if len(latent):
            groups = torch.arange(len(rows), len(rows) + len(latent), device=x.device)
            turn = self._rope.yarn(groups * self._ratio)
            rows.append(compressed_rows(latent, turn))
            keys = index_keys(latent, turn, self._wk, self._k_norm, self._eps)
            state.index_keys[self._layer].append(keys)
            state.last_key_source = self._layer
        return latent

    def _pooled(self, x: torch.Tensor, start: int, state: SequenceState) -> torch.Tensor:
        wkv, wgate = self._weights.wkv, self._weights.wgate
        if wgate is None:
            return linear(x, wkv)
        # Not `linear_fp32`: what follows is rounded to four bits, where every bit may count.
        products = [F.linear(x.float(), weight.float()) for weight in (wkv, wgate)]
        both = torch.cat((state.pending(self._layer, start), torch.stack(products)), 1)
        full = both.shape[1] // self._ratio * self._ratio
        state.pending(self._layer, start + len(x)).copy_(both[:, full:])
        return pool_groups(both[0, :full], both[1, :full], self._ratio)
