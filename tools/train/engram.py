"""Engram for training: the n-gram hash on the device, table look-up, and the gated addition.

Owns the trainable tables. The hash's constants are `engram_io`'s own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engram_io.hashing import NgramHash
from protocol.config import ModelConfig
from tools.train import rounding
from tools.train.fused import fused
from tools.train.parameters import Matrix, fp8_linear


class HashConstants(nn.Module):
    """A `NgramHash`'s arrays as device tensors."""

    def __init__(self, source: NgramHash) -> None:
        super().__init__()
        self.pad = source.pad_class
        for name in ("classes", "primes", "offsets", "multipliers"):
            self.register_buffer(name, torch.from_numpy(getattr(source, name)), persistent=False)
        self.classes: torch.Tensor
        self.primes: torch.Tensor
        self.offsets: torch.Tensor
        self.multipliers: torch.Tensor

    @torch.no_grad()
    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows int64 [layers, B, S, rows_per_token] of sequences that start at column 0."""
        classes = self.classes[tokens]
        layers, lengths, _ = self.primes.shape
        mixed = torch.zeros((layers, *tokens.shape), dtype=torch.int64, device=tokens.device)
        rows = []
        for back in range(lengths + 1):
            seen = F.pad(classes[:, : classes.shape[1] - back], (back, 0), value=self.pad)
            mixed = mixed ^ (seen * self.multipliers[:, back, None, None])
            if back:
                rows.append(mixed[..., None] % self.primes[:, None, None, back - 1])
        return torch.cat(rows, -1) + self.offsets[:, None, None]


class Engram(nn.Module):
    """One layer's table, projection and gate weights."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embed = nn.Embedding(rows, config.engram_head_dim)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.wkv = Matrix(config.hidden_size * (config.hc_mult + 1), config.engram_width)
        with torch.no_grad():
            # The value starts small, so that untrained rows disturb nothing.
            self.wkv.weight[config.hc_mult * config.hidden_size :] *= 0.1
        self.q_weight = nn.Parameter(torch.ones(config.hc_mult, config.hidden_size))
        self.k_weight = nn.Parameter(torch.ones(config.hc_mult, config.hidden_size))

    def forward(self, streams: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """bf16 streams [T, hc, H] with the gated values of `rows` int64 [T, rows_per_token]
        added."""
        looked_up = self.embed(rows).flatten(1)
        return _add(streams, looked_up, self.wkv.weight, self.q_weight, self.k_weight, self.eps)


@fused
def _add(
    streams: torch.Tensor,
    looked_up: torch.Tensor,
    wkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    hc, hidden = streams.shape[1:]
    kv = fp8_linear(rounding.engram_rows(looked_up), wkv).unflatten(-1, (hc + 1, hidden))
    keys, value = kv[:, :hc].float(), kv[:, hc:].float()
    wide = streams.float()
    both = rounding.stored_bf16(q_weight).float() * rounding.stored_bf16(k_weight).float()
    dot = (wide * both * keys).sum(-1) * hidden**-0.5
    dot = dot * torch.rsqrt(wide.square().mean(-1) + eps)
    dot = dot * torch.rsqrt(keys.square().mean(-1) + eps)
    gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp_min(1e-6)))
    added: torch.Tensor = wide + gate[..., None] * value
    return added.to(torch.bfloat16)
