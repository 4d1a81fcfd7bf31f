"""The V4.1 model for training: blocks, backbone and loss.

Owns the order of sublayers and the parameters' names, which are the checkpoint's. B sequences of S
tokens; streams are [B * S, hc, H] bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from engram_io.hashing import NgramHash
from protocol.config import ModelConfig
from tools.train.attention import Attention, Shared
from tools.train.engram import Engram, HashConstants
from tools.train.fused import fused
from tools.train.hyper import collapse, enter, leave, rms_norm
from tools.train.moe import Moe
from tools.train.parameters import Matrix, Scale
from tools.train.rotation import Angles, angles
from tools.train.rounding import stored_bf16

EMBEDDING_STD = 0.2
NEAR_ONE_HOT = 3.0
NEAR_IDENTITY = 4.0


class Block(nn.Module):
    """One layer: attention and experts, each between its mixes."""

    def __init__(self, config: ModelConfig, layer: int, draft: bool = False) -> None:
        super().__init__()
        self.config = c = config
        experts = c.dspark_n_routed_experts if draft else c.n_routed_experts
        picks = c.dspark_num_experts_per_tok if draft else c.num_experts_per_tok
        self.attn_norm, self.ffn_norm = Scale(c.hidden_size), Scale(c.hidden_size)
        self.attn = Attention(c, layer, draft)
        self.ffn = Moe(c, experts, picks, run=0 if draft else c.sliding_window)
        for side in ("attn", "ffn"):
            self._add_mixes(side, layer)
        if not draft and layer in c.engram_layer_ids:
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
            self.engram = Engram(c, rows)

    def _add_mixes(self, side: str, layer: int) -> None:
        """Starts as a plain residual network: each sublayer reads one stream, all receive it."""
        hc, hidden = self.config.hc_mult, self.config.hidden_size
        base = torch.zeros((2 + hc) * hc)
        base[:hc] = -NEAR_ONE_HOT
        base[layer % hc] = NEAR_ONE_HOT
        base[2 * hc :] = (torch.eye(hc) * NEAR_IDENTITY).flatten()
        self.register_parameter(
            f"hc_{side}_fn", nn.Parameter(torch.zeros((2 + hc) * hc, hc * hidden))
        )
        self.register_parameter(f"hc_{side}_base", nn.Parameter(base))
        self.register_parameter(f"hc_{side}_scale", nn.Parameter(torch.ones(3)))

    def enter(
        self, streams: torch.Tensor, pre: torch.Tensor, side: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sublayer's input [T, H] and its own pre, post and comb mixes."""
        c = self.config
        fn, base, scale = (getattr(self, f"hc_{side}_{part}") for part in ("fn", "base", "scale"))
        norm = (self.attn_norm if side == "attn" else self.ffn_norm).weight
        return enter(
            streams, pre, fn, base, scale, norm, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps
        )

    def experts(
        self, streams: torch.Tensor, pre: torch.Tensor, trace: list[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The second half of the layer: streams after it, and the mix handed on."""
        x, own_pre, post, comb = self.enter(streams, pre, "ffn")
        if trace is not None:
            trace.append(x)
        return leave(self.ffn(x), streams, post, comb), own_pre


@dataclass
class Pass:
    """What a forward pass gives: `hidden` [B, S, H] before the head; the mean streams at the input
    of each draft target layer [B, S, H]; the indexers' loss."""

    hidden: torch.Tensor
    targets: list[torch.Tensor]
    index_loss: torch.Tensor


class Model(nn.Module):
    """The backbone. `ngrams` is None exactly where the config has no engram layer."""

    def __init__(self, config: ModelConfig, ngrams: NgramHash | None) -> None:
        super().__init__()
        self.config = c = config
        self.embed, self.head = (
            Matrix(c.vocab_size, c.hidden_size),
            Matrix(c.vocab_size, c.hidden_size),
        )
        nn.init.normal_(self.embed.weight, std=EMBEDDING_STD)
        nn.init.zeros_(self.head.weight)
        self.norm = Scale(c.hidden_size)
        self.layers = nn.ModuleList(Block(c, layer) for layer in range(c.num_hidden_layers))
        self.hash = HashConstants(ngrams) if ngrams is not None else None

    def forward(self, tokens: torch.Tensor, trace: list[torch.Tensor] | None = None) -> Pass:
        """int64 [B, S], S a multiple of the window; `trace` collects every layer's MoE input."""
        c = self.config
        batch, length = tokens.shape
        rows = self.hash.rows(tokens).flatten(1, 2) if self.hash is not None else None
        positions = torch.arange(length, device=tokens.device)
        plain, compressed = angles(c, False, positions), angles(c, True, positions)
        streams = F.embedding(tokens.flatten(), stored_bf16(self.embed.weight))[:, None]
        streams = streams.expand(-1, c.hc_mult, -1).contiguous()
        pre = first_mix(streams)
        shared, targets = Shared(), []
        for number, block in enumerate(self.blocks):
            if rows is not None and number in c.engram_layer_ids:
                streams = block.engram(streams, rows[c.engram_layer_ids.index(number)])
            if number in c.dspark_target_layer_ids:
                targets.append(_mean(streams.detach()).view(batch, length, -1))
            turn = compressed if c.compress_ratios[number] else plain
            streams, pre = self._layer(block, streams, pre, turn, shared, (batch, length), trace)
        hidden = rms_norm(collapse(streams, pre), self.norm.weight, c.rms_norm_eps)
        index_loss = (
            torch.stack(shared.index_losses).sum() if shared.index_losses else hidden.new_zeros(())
        )
        return Pass(hidden.view(batch, length, -1), targets, index_loss)

    def _layer(
        self,
        block: Block,
        streams: torch.Tensor,
        pre: torch.Tensor,
        turn: Angles,
        shared: Shared,
        shape: tuple[int, int],
        trace: list[torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, own_pre, post, comb = block.enter(streams, pre, "attn")
        y = block.attn(x.view(*shape, -1), turn, shared)
        streams = leave(y.flatten(0, 1), streams, post, comb)
        return block.experts(streams, own_pre, trace)

    @property
    def blocks(self) -> list[Block]:
        """The layers under their own type."""
        return cast("list[Block]", list(self.layers))

    def moes(self) -> list[Moe]:
        """Every layer's experts, for balancing."""
        return [block.ffn for block in self.blocks]


def first_mix(streams: torch.Tensor) -> torch.Tensor:
    """The mix before the first sublayer: all of stream 0, fp32 [T, hc]."""
    pre = torch.zeros(streams.shape[:2], device=streams.device)
    pre[:, 0] = 1
    # Like every later mix, so that one compiled graph serves all.
    return pre.requires_grad_(torch.is_grad_enabled())


def _mean(streams: torch.Tensor) -> torch.Tensor:
    return streams.float().mean(1).to(torch.bfloat16)


@fused
def losses(hidden: torch.Tensor, head: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats of every position: `hidden` [T, H] bf16, master `head`, int64 [T]."""
    stored = stored_bf16(head)
    logits = (
        F.linear(hidden, stored).float()
        if hidden.is_cuda and torch.is_grad_enabled()
        else F.linear(hidden.float(), stored.float())
    )
    return F.cross_entropy(logits, wanted, reduction="none")
