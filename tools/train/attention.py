"""Attention for training: whole sequences at once, window in blocks, compressed rows densely
masked.

Owns the trainable attention, compressor and indexer. The indexer learns to imitate the attention
its layer pays to the compressed rows (a KL divergence); nothing else flows through the choice of
rows.
B sequences of S tokens; R compressed rows; S is a multiple of the window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from protocol.config import ModelConfig
from tools.train import rounding
from tools.train.fused import fused
from tools.train.hyper import rms_norm
from tools.train.parameters import Matrix, Scale, bf16_linear, fp8_linear
from tools.train.rotation import Angles, rotate

NEVER = -1e30


@dataclass
class Shared:
    """What one pass hands down the stack: the last source's compressed KV, index keys and choice.

    `kv` [B, R, head_dim], `index_keys` [B, R, index_head_dim], `chosen` and `candidates` bool
    [B, S, R], `index_losses` one scalar an index source.
    """

    kv: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    candidates: torch.Tensor | None = None
    index_losses: list[torch.Tensor] = field(default_factory=list)


class Compressor(nn.Module):
    """The compressed KV of a source layer."""

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        super().__init__()
        self.wkv = Matrix(config.head_dim, config.hidden_size)
        if ratio > 1:
            self.wgate = Matrix(config.head_dim, config.hidden_size)
        self.norm = Scale(config.head_dim)


class Indexer(nn.Module):
    """The choice of compressed rows of an index source."""

    def __init__(self, config: ModelConfig, owns_keys: bool) -> None:
        super().__init__()
        self.wq_b = Matrix(config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        self.weights_proj = Matrix(config.index_n_heads, config.hidden_size)
        if owns_keys:
            self.wk = Matrix(config.index_head_dim, config.head_dim)
            self.k_norm = Scale(config.index_head_dim)


class Attention(nn.Module):
    """One layer's attention; `layer` may be a draft layer, which has no source and no ratio."""

    def __init__(self, config: ModelConfig, layer: int, draft: bool = False) -> None:
        super().__init__()
        c = self.config = config
        self.layer = layer
        self.ratio = 0 if draft else c.compress_ratios[layer]
        self.attn_sink = nn.Parameter(torch.zeros(c.num_attention_heads))
        self.wq_a = Matrix(c.q_lora_rank, c.hidden_size)
        self.q_norm = Scale(c.q_lora_rank)
        self.wq_b = Matrix(c.num_attention_heads * c.head_dim, c.q_lora_rank)
        self.wkv = Matrix(c.head_dim, c.hidden_size)
        self.kv_norm = Scale(c.head_dim)
        self.wo_a = Matrix(
            c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups
        )
        self.wo_b = Matrix(c.hidden_size, c.o_groups * c.o_lora_rank, zero=True)
        if not draft and layer in c.kv_source_layer_ids:
            self.compressor = Compressor(c, self.ratio)
        if not draft and layer in c.index_source_layer_ids:
            self.indexer = Indexer(c, layer in c.kv_source_layer_ids)

    def forward(self, x: torch.Tensor, angles: Angles, shared: Shared) -> torch.Tensor:
        """bf16 [B, S, H] -> bf16 [B, S, H]; sources write to `shared`."""
        c = self.config
        q, qr, kv = queries(
            x, *self.projections(), angles.cos, angles.sin, c.head_dim, c.rms_norm_eps
        )
        if self.ratio == 0:
            out = _attend_window(
                q, kv, self.attn_sink, angles.cos, angles.sin, c.sliding_window, c.head_dim**-0.5
            )
            return self.output(out)
        if hasattr(self, "compressor"):
            self._write_rows(x, angles, shared)
        assert shared.kv is not None
        if hasattr(self, "indexer"):
            scores = self._choose(x, qr, angles, shared)
            shared.index_losses.append(_imitation(scores, q.detach(), shared.kv.detach()))
        assert shared.chosen is not None
        out = _attend(
            q, kv, shared.kv, shared.chosen, self.attn_sink, angles.cos, angles.sin,
            c.sliding_window, c.head_dim**-0.5,
        )  # fmt: skip
        return self.output(out)

    def projections(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """wq_a, q_norm, wq_b, wkv, kv_norm as `queries` takes them."""
        return (
            self.wq_a.weight, self.q_norm.weight, self.wq_b.weight, self.wkv.weight,
            self.kv_norm.weight,
        )  # fmt: skip

    def output(self, out: torch.Tensor) -> torch.Tensor:
        """The two output projections of bf16 `out` [..., heads, head_dim]."""
        return _project(out, self.wo_a.weight, self.wo_b.weight, self.config.o_groups)

    def _write_rows(self, x: torch.Tensor, angles: Angles, shared: Shared) -> None:
        source, eps = self.compressor, self.config.rms_norm_eps
        gate = source.wgate.weight if self.ratio > 1 else None
        latent, shared.kv = _compress(
            x, source.wkv.weight, gate, source.norm.weight, angles.cos, angles.sin, self.ratio, eps
        )
        indexer = self.indexer
        shared.index_keys = _index_keys(
            latent.detach(), indexer.wk.weight, indexer.k_norm.weight, angles.cos, angles.sin,
            self.ratio, eps,
        )  # fmt: skip

    def _choose(
        self, x: torch.Tensor, qr: torch.Tensor, angles: Angles, shared: Shared
    ) -> torch.Tensor:
        """Scores [B, S, R]; sets `shared.chosen` and, at their source, the candidates."""
        c, indexer = self.config, self.indexer
        assert shared.index_keys is not None
        scores = _index_scores(
            qr.detach(), x.detach(), indexer.wq_b.weight, indexer.weights_proj.weight,
            shared.index_keys, angles.cos, angles.sin, c.index_n_heads, self.ratio,
        )  # fmt: skip
        if self.layer > c.candidate_source_layer_id:
            assert shared.candidates is not None
            scores = scores.masked_fill(~shared.candidates, NEVER)
        with torch.no_grad():
            shared.chosen = choose_rows(scores, c.index_topk)
            if self.layer == c.candidate_source_layer_id:
                shared.candidates = candidate_rows(
                    scores, c.candidate_block_size, c.candidate_topk_blocks, self.ratio
                )
        return scores


def choose_rows(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """Bool like `scores` [B, S, R]: the best `keep` rows of those not at NEVER."""
    if scores.shape[-1] > keep:
        best = scores.topk(keep, sorted=False).indices
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        return mask & (scores > NEVER)
    return scores > NEVER


def candidate_rows(scores: torch.Tensor, block: int, keep: int, ratio: int) -> torch.Tensor:
    """Bool [B, S, R]: rows of the `keep` best blocks, that of the newest visible row among them."""
    batch, length, rows = scores.shape
    blocks = -(-rows // block)
    padded = F.pad(scores, (0, blocks * block - rows), value=NEVER)
    best = padded.unflatten(-1, (blocks, block)).amax(-1)
    newest = ((torch.arange(length, device=scores.device) + 1) // ratio - 1).clamp_min(0) // block
    forced = F.one_hot(newest, blocks).bool().expand(batch, -1, -1)
    kept = choose_rows(best.masked_fill(forced & (best > NEVER), -NEVER), keep)
    return kept.repeat_interleave(block, -1)[..., :rows]


@fused
def queries(
    x: torch.Tensor,
    wq_a: torch.Tensor,
    q_norm: torch.Tensor,
    wq_b: torch.Tensor,
    wkv: torch.Tensor,
    kv_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_dim: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries [..., heads, head_dim], their low-rank form, and the rounded window KV."""
    qr = rms_norm(fp8_linear(x, wq_a), q_norm, eps)
    q = fp8_linear(qr, wq_b).unflatten(-1, (-1, head_dim))
    q = rotate(q, cos.unsqueeze(-2), sin.unsqueeze(-2))
    return q, qr, window_rows(x, wkv, kv_norm, cos, sin, eps)


def window_rows(
    x: torch.Tensor,
    wkv: torch.Tensor,
    kv_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Rotated and rounded window KV of `x`."""
    return rounding.window_kv(rotate(rms_norm(fp8_linear(x, wkv), kv_norm, eps), cos, sin))


def _compress(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor | None,
    norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    ratio: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [B, R, head_dim] before rotation, and the compressed rows as stored."""
    mixed = bf16_linear(x, wkv)
    if wgate is not None:
        shares = torch.softmax(bf16_linear(x, wgate).float().unflatten(1, (-1, ratio)), 2)
        mixed = (mixed.float().unflatten(1, (-1, ratio)) * shares).sum(2).to(torch.bfloat16)
    latent = rms_norm(mixed, norm, eps)
    return latent, rounding.compressed_kv(rotate(latent, cos[::ratio], sin[::ratio]))


def _index_keys(
    latent: torch.Tensor,
    wk: torch.Tensor,
    norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    ratio: int,
    eps: float,
) -> torch.Tensor:
    keys = rms_norm(bf16_linear(latent, wk), norm, eps)
    return rounding.index_vector(rotate(keys, cos[::ratio], sin[::ratio]))


def _index_scores(
    qr: torch.Tensor,
    x: torch.Tensor,
    wq_b: torch.Tensor,
    weights_proj: torch.Tensor,
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    ratio: int,
) -> torch.Tensor:
    """fp32 [B, S, R]; NEVER where a row is not yet visible."""
    batch, length = x.shape[:2]
    width = keys.shape[-1]
    q = fp8_linear(qr, wq_b).unflatten(-1, (heads, width))
    q = rounding.index_vector(rotate(q, cos[:, None], sin[:, None]))
    weights = bf16_linear(x, weights_proj).float() * (width * heads) ** -0.5
    dots = torch.bmm(q.reshape(batch, length * heads, width), keys.transpose(1, 2))
    dots = dots.unflatten(1, (length, heads)).float()
    scores: torch.Tensor = (torch.relu(dots) * weights.unsqueeze(-1)).sum(2)
    return scores.masked_fill(~_visible(length, keys.shape[1], ratio, x.device), NEVER)


def _visible(length: int, rows: int, ratio: int, device: torch.device) -> torch.Tensor:
    """Bool [S, R]: a query at p sees rows below (p + 1) // ratio."""
    positions = torch.arange(length, device=device)[:, None]
    return torch.arange(rows, device=device)[None] < (positions + 1) // ratio


def _window_scores(
    q: torch.Tensor, kv: torch.Tensor, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [B, S/w, w, heads, 2w] of each query over its block and the one before, and the keys."""
    blocks = kv.unflatten(1, (-1, window))
    before = F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0))
    keys = torch.cat([before, blocks], 2)
    batch, count = blocks.shape[:2]
    heads, width = q.shape[-2:]
    flat = q.reshape(batch * count, window * heads, width)
    scores = torch.bmm(flat, keys.flatten(0, 1).transpose(1, 2)).float() * scale
    scores = scores.view(batch, count, window, heads, 2 * window)
    query = torch.arange(window, device=q.device)[:, None, None]
    key = torch.arange(2 * window, device=q.device)
    block = torch.arange(count, device=q.device)[:, None, None, None]
    seen = (key > query) & (key <= query + window) & (key + (block - 1) * window >= 0)
    return scores.masked_fill(~seen, NEVER), keys


@fused
def _attend_window(
    q: torch.Tensor,
    kv: torch.Tensor,
    sink: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: int,
    scale: float,
) -> torch.Tensor:
    """bf16 [B, S, heads, head_dim], rotated back."""
    batch, length, heads, width = q.shape
    scores, keys = _window_scores(q, kv, window, scale)
    top = torch.maximum(scores.amax(-1), sink).detach()
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1) + torch.exp(sink - top)
    mixed = torch.bmm(
        weights.to(torch.bfloat16).reshape(-1, window * heads, 2 * window), keys.flatten(0, 1)
    )
    out = mixed.view(batch, length, heads, width).float() / total.view(batch, length, heads, 1)
    return rotate(out.to(torch.bfloat16), cos[:, None], -sin[:, None])


@fused
def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    sink: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Attention over window and chosen rows in one softmax: bf16 [B, S, heads, head_dim]."""
    batch, length, heads, width = q.shape
    near, keys = _window_scores(q, kv, window, scale)
    near = near.view(batch, length, heads, 2 * window)
    far = torch.bmm(q.reshape(batch, length * heads, width), rows.transpose(1, 2)).float() * scale
    far = far.view(batch, length, heads, -1)
    far = far.masked_fill(~chosen.unsqueeze(2), NEVER)
    top = torch.maximum(torch.maximum(near.amax(-1), far.amax(-1)), sink).detach()
    near_weights = torch.exp(near - top[..., None])
    far_weights = torch.exp(far - top[..., None])
    total = near_weights.sum(-1) + far_weights.sum(-1) + torch.exp(sink - top)
    near_out = torch.bmm(
        near_weights.to(torch.bfloat16).reshape(-1, window * heads, 2 * window), keys.flatten(0, 1)
    ).view(batch, length, heads, width)
    far_out = torch.bmm(far_weights.to(torch.bfloat16).view(batch, length * heads, -1), rows).view(
        batch, length, heads, width
    )
    out = (near_out.float() + far_out.float()) / total.unsqueeze(-1)
    return rotate(out.to(torch.bfloat16), cos[:, None], -sin[:, None])


def _imitation(index_scores: torch.Tensor, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """KL from the attention over the rows the indexer may score (mean of heads) to its softmax."""
    batch, length, heads, width = q.shape
    allowed = index_scores > NEVER
    with torch.no_grad():
        scores = torch.bmm(q.reshape(batch, length * heads, width), rows.transpose(1, 2))
        scores = scores.view(batch, length, heads, -1).float() * width**-0.5
        wanted = torch.softmax(scores.masked_fill_(~allowed.unsqueeze(2), NEVER), -1).mean(2)
        wanted = wanted * allowed
    said = torch.log_softmax(index_scores, -1)
    gap = wanted * (torch.log(wanted.clamp_min(1e-9)) - said)
    return gap.masked_fill(~allowed, 0.0).sum(-1).mean()


@fused
def _project(
    out: torch.Tensor, wo_a: torch.Tensor, wo_b: torch.Tensor, groups: int
) -> torch.Tensor:
    """wo_a by group of heads (input as it is), then wo_b."""
    lead = out.shape[:-2]
    grouped = out.reshape(-1, groups, out.shape[-2] * out.shape[-1] // groups)
    low = torch.einsum(
        "tgi,gri->tgr", grouped, rounding.fp8_weight(wo_a).unflatten(0, (groups, -1))
    )
    return fp8_linear(low.reshape(*lead, -1), wo_b)
