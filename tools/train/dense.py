"""The dense twin: a plain transformer with as many active parameters, trained on the same batches.

Owns the yardstick only. Nothing in it is rounded to fp8 or fp4, which favours it.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from protocol.config import ModelConfig
from tools.train.fused import fused
from tools.train.hyper import rms_norm
from tools.train.model import EMBEDDING_STD
from tools.train.parameters import Matrix, Scale, bf16_linear

THETA = 10000.0
EPS = 1e-6


def active_parameters(config: ModelConfig) -> int:
    """Parameters that take part in one token's products: all of attention and the mixes, the picked
    experts, gate, indexer, compressor and engram projection; the head; no looked-up row."""
    c, hidden = config, config.hidden_size
    heads = c.num_attention_heads * c.head_dim
    attention = (
        c.q_lora_rank * (hidden + heads)
        + c.head_dim * hidden
        + c.o_lora_rank * (heads + c.o_groups * hidden)
    )
    mixes = 2 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * hidden
    experts = (c.num_experts_per_tok + 1) * 3 * hidden * c.moe_intermediate_size
    total = c.num_hidden_layers * (attention + mixes + experts + c.n_routed_experts * hidden)
    for layer in c.kv_source_layer_ids:
        compressed = (2 if c.compress_ratios[layer] > 1 else 1) * hidden
        total += c.head_dim * (compressed + c.index_head_dim)
    for _ in c.index_source_layer_ids:
        total += c.index_n_heads * (c.index_head_dim * c.q_lora_rank + hidden)
    total += len(c.engram_layer_ids) * hidden * (c.hc_mult + 1) * c.engram_width
    return total + c.vocab_size * hidden


def feed_forward_width(config: ModelConfig) -> int:
    """The twin's feed-forward width: the least multiple of 8 that reaches the active parameters."""
    hidden = config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    a_layer = (active_parameters(config) - config.vocab_size * hidden) / config.num_hidden_layers
    return -(-int(a_layer - 4 * hidden * heads) // (3 * hidden * 8)) * 8


class DenseBlock(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, feed_forward_width(config)
        heads = config.num_attention_heads * config.head_dim
        self.attn_norm, self.ffn_norm = Scale(hidden), Scale(hidden)
        self.qkv, self.out = Matrix(3 * heads, hidden), Matrix(hidden, heads, zero=True)
        self.gate_up, self.down = Matrix(2 * width, hidden), Matrix(hidden, width, zero=True)


class Dense(nn.Module):
    """The twin of a config: same hidden size, layers, heads and vocabulary."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Matrix(config.vocab_size, config.hidden_size)
        self.head = Matrix(config.vocab_size, config.hidden_size, zero=True)
        nn.init.normal_(self.embed.weight, std=EMBEDDING_STD)
        self.norm = Scale(config.hidden_size)
        self.layers = nn.ModuleList(DenseBlock(config) for _ in range(config.num_hidden_layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden bf16 [B, S, H] before the head, of int64 [B, S]."""
        half = self.config.head_dim // 2
        steps = torch.arange(half, device=tokens.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        turn = positions[:, None] * THETA ** (-steps / half)
        x = F.embedding(tokens, self.embed.weight.to(torch.bfloat16))
        for block in cast("list[DenseBlock]", list(self.layers)):
            x = _layer(
                x, turn.cos(), turn.sin(), block.attn_norm.weight, block.qkv.weight,
                block.out.weight, block.ffn_norm.weight, block.gate_up.weight, block.down.weight,
                self.config.num_attention_heads,
            )  # fmt: skip
        return rms_norm(x, self.norm.weight, EPS)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(torch.bfloat16)


@fused
def _layer(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attn_norm: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    ffn_norm: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    joined = bf16_linear(rms_norm(x, attn_norm, EPS), qkv).unflatten(-1, (3, heads, -1))
    q, k, v = (part.transpose(1, 2) for part in joined.unbind(2))
    mixed = F.scaled_dot_product_attention(
        _turn(q, cos, sin), _turn(k, cos, sin), v, is_causal=True
    )
    x = x + bf16_linear(mixed.transpose(1, 2).flatten(2), out)
    g, u = bf16_linear(rms_norm(x, ffn_norm, EPS), gate_up).chunk(2, -1)
    return x + bf16_linear(F.silu(g) * u, down)
