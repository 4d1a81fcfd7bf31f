"""The DSpark draft head for training: blocks of tokens drafted at anchors inside known sequences.

Owns the `mtp.*` weights. It learns from the backbone's detached states and through its detached
embedding and head, so it changes nothing in the backbone. A anchors a sequence, K tokens a block.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from protocol.config import ModelConfig
from tools.train import rounding
from tools.train.attention import NEVER, Attention, queries, window_rows
from tools.train.fused import eager
from tools.train.hyper import collapse, leave, rms_norm
from tools.train.model import Block, Model, Pass, first_mix
from tools.train.moe import Moe
from tools.train.parameters import Matrix, Scale, bf16_linear, fp8_linear
from tools.train.rotation import angles, rotate


class MarkovHead(nn.Module):
    """Logits from the previous draft alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = Matrix(config.vocab_size, config.dspark_markov_rank)
        self.head = Matrix(config.vocab_size, config.dspark_markov_rank, zero=True)


class ConfidenceHead(nn.Module):
    """How likely a draft is to be kept."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = Matrix(1, config.hidden_size + config.dspark_markov_rank, zero=True)


class DraftBlock(Block):
    """One `mtp` block; the first owns the way in, the last the way out."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__(config, number, draft=True)
        c = config
        if number == 0:
            self.main_proj = Matrix(c.hidden_size, c.hidden_size * len(c.dspark_target_layer_ids))
            self.main_norm = Scale(c.hidden_size)
        if number == c.num_nextn_predict_layers - 1:
            self.norm = Scale(c.hidden_size)
            self.markov_head = MarkovHead(c)
            self.confidence_head = ConfidenceHead(c)


class Draft(nn.Module):
    """All draft blocks; parameters are named `mtp.N.*`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.mtp = nn.ModuleList(
            DraftBlock(config, number) for number in range(config.num_nextn_predict_layers)
        )

    @property
    def blocks(self) -> list[DraftBlock]:
        """The draft blocks under their own type."""
        return cast("list[DraftBlock]", list(self.mtp))

    def moes(self) -> list[Moe]:
        """Every block's experts, for balancing."""
        return [block.ffn for block in self.blocks]

    def forward(
        self, backbone: Model, done: Pass, tokens: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `_forward`; eager, since its shapes are its own and it is trained on few steps."""
        with eager():
            return self._forward(backbone, done, tokens, anchors)

    def _forward(
        self, backbone: Model, done: Pass, tokens: torch.Tensor, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits fp32 [B, A, K, V] and confidences fp32 [B, A, K] (before any squashing).

        `tokens` int64 [B, >= max(anchors) + K + 1]; the block of anchor p holds the token at p + 1
        and noise, sits at p + 1 .. p + K, and drafts p + 2 .. p + K + 1, each knowing the true
        token before it.
        """
        c, size = self.config, self.config.dspark_block_size
        steps = torch.arange(size, device=tokens.device)
        positions = anchors[:, None] + 1 + steps
        before = tokens[:, positions]
        inputs = torch.where(steps == 0, before, c.dspark_noise_token_id)
        embedding = rounding.stored_bf16(backbone.embed.weight.detach())
        streams = F.embedding(inputs.flatten(), embedding)[:, None].repeat(1, c.hc_mult, 1)
        pre = first_mix(streams)
        main = self._main(done)
        for block in self.blocks:
            x, own_pre, post, comb = block.enter(streams, pre, "attn")
            y = attend(block.attn, x.view(*inputs.shape, -1), main, anchors, positions)
            streams = leave(y.flatten(0, 2), streams, post, comb)
            streams, pre = block.experts(streams, own_pre)
        return self._heads(backbone, collapse(streams, pre), before)

    def _main(self, done: Pass) -> torch.Tensor:
        first = self.blocks[0]
        return _project_main(
            torch.cat(done.targets, -1), first.main_proj.weight, first.main_norm.weight,
            self.config.rms_norm_eps,
        )  # fmt: skip

    def _heads(
        self, backbone: Model, collapsed: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        last = self.blocks[-1]
        return _heads(
            collapsed.view(*before.shape, -1), before, last.norm.weight,
            backbone.head.weight.detach(), last.markov_head.embed.weight,
            last.markov_head.head.weight, last.confidence_head.proj.weight,
            self.config.rms_norm_eps,
        )  # fmt: skip


def _project_main(
    joined: torch.Tensor, projection: torch.Tensor, norm: torch.Tensor, eps: float
) -> torch.Tensor:
    return rms_norm(fp8_linear(joined, projection), norm, eps)


def _heads(
    collapsed: torch.Tensor,
    before: torch.Tensor,
    norm: torch.Tensor,
    head: torch.Tensor,
    markov_embed: torch.Tensor,
    markov_head: torch.Tensor,
    confidence: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    markov = F.embedding(before, rounding.stored_bf16(markov_embed))
    logits = bf16_linear(rms_norm(collapsed, norm, eps), head).float()
    logits = logits + bf16_linear(markov, markov_head).float()
    seen = torch.cat([collapsed, markov], -1).float()
    return logits, F.linear(seen, rounding.stored_bf16(confidence).float()).squeeze(-1)


def attend(
    attention: Attention,
    x: torch.Tensor,
    main: torch.Tensor,
    anchors: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Each block of `x` [B, A, K, H] over the main window of its anchor and over itself, all of
    it."""
    c = attention.config
    weights = attention.projections()
    turn = angles(c, False, positions)
    q, _, own = queries(x, *weights, *turn, c.head_dim, c.rms_norm_eps)
    everywhere = angles(c, False, torch.arange(main.shape[1], device=main.device))
    far = window_rows(main, *weights[3:], *everywhere, c.rms_norm_eps)
    window = anchors[:, None] - torch.arange(c.sliding_window, device=main.device)
    seen = torch.cat([window >= 0, torch.ones_like(positions, dtype=torch.bool)], 1)
    keys = torch.cat([far[:, window.clamp_min(0)], own], 2)
    out = _attend_block(q, keys, seen, attention.attn_sink, *turn, c.head_dim**-0.5)
    return attention.output(out)


def _attend_block(
    q: torch.Tensor,
    keys: torch.Tensor,
    seen: torch.Tensor,
    sink: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    scores = torch.einsum("bakhd,bajd->bakhj", q, keys).float() * scale
    scores = scores.masked_fill(~seen[:, None, None], NEVER)
    top = torch.maximum(scores.amax(-1), sink).detach()
    shares = torch.exp(scores - top[..., None])
    total = shares.sum(-1) + torch.exp(sink - top)
    mixed = torch.einsum("bakhj,bajd->bakhd", shares.to(torch.bfloat16), keys)
    out = (mixed.float() / total[..., None]).to(torch.bfloat16)
    return rotate(out, cos.unsqueeze(-2), -sin.unsqueeze(-2))


def draft_loss(
    logits: torch.Tensor, confidence: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss of drafts and of their confidence, and the share of right drafts [K]."""
    steps = torch.arange(logits.shape[2], device=tokens.device)
    wanted = tokens[:, anchors[:, None] + 2 + steps]
    right = logits.detach().argmax(-1) == wanted
    loss = F.cross_entropy(logits.flatten(0, -2), wanted.flatten())
    sure = F.binary_cross_entropy_with_logits(confidence, right.float())
    return loss + sure, right.float().mean((0, 1))
