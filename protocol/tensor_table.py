"""Every text tensor that a config implies: its name, dtype, shape, and the shard that holds it.

One table serves the check of a checkpoint, the writer of synthetic ones and the loaders, so they
cannot disagree. Vision tensors are not in it: a text-only engine skips them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from protocol.config import ModelConfig

TILE = (
    32  # fp8 weights: one scale per TILE x TILE tile; fp4 weights and engram rows: per TILE columns
)
EXPERT_MATRICES = ("w1", "w3", "w2")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the release stores it. `group` is the shard it belongs to, in file order.

    Groups: `embed`, `layers.L`, `head`, `mtp.D`, `engram.L`.
    """

    dtype: str
    shape: tuple[int, ...]
    group: str


def expert_tensor(layer: int, expert: int, matrix: str, part: str, prefix: str = "layers") -> str:
    """Name of a routed expert's tensor; `part` is `weight` or `scale`."""
    return f"{prefix}.{layer}.ffn.experts.{expert}.{matrix}.{part}"


def kind_of(name: str) -> str:
    """What a tensor is part of: `dense` (loaded at start), `routed experts`, `engram tables` (read
    as they are needed), `draft layers` or `vision` (not used)."""
    if name.startswith("mtp."):
        return "draft layers"
    if ".ffn.experts." in name:
        return "routed experts"
    if ".engram.embed." in name:
        return "engram tables"
    return "dense" if name.startswith(("layers.", "embed.", "head.", "norm.")) else "vision"


@lru_cache(maxsize=4)
def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every text tensor of a checkpoint with this config, in file order."""
    table: dict[str, TensorSpec] = {}
    hidden, vocab = config.hidden_size, config.vocab_size
    table["embed.weight"] = TensorSpec("BF16", (vocab, hidden), "embed")
    for layer in range(config.num_hidden_layers):
        group = f"layers.{layer}"
        table.update(_block(config, group, config.n_routed_experts))
        table.update(_sources(config, layer, group))
    table["head.weight"] = TensorSpec("BF16", (vocab, hidden), "head")
    table["norm.weight"] = TensorSpec("BF16", (hidden,), "head")
    for draft in range(config.num_nextn_predict_layers):
        group = f"mtp.{draft}"
        table.update(_block(config, group, config.dspark_n_routed_experts))
        table.update(_draft_ends(config, draft, group))
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        table.update(_engram(config, layer, rows))
    return table


def _pair(
    name: str, dtype: str, shape: tuple[int, ...], scale: tuple[int, ...], group: str
) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{name}.weight", TensorSpec(dtype, shape, group)
    yield f"{name}.scale", TensorSpec("F8_E8M0", scale, group)


def _fp8(name: str, out: int, width: int, group: str) -> Iterator[tuple[str, TensorSpec]]:
    tiles = (math.ceil(out / TILE), math.ceil(width / TILE))
    yield from _pair(name, "F8_E4M3", (out, width), tiles, group)


def _fp4(name: str, out: int, width: int, group: str) -> Iterator[tuple[str, TensorSpec]]:
    yield from _pair(name, "I8", (out, width // 2), (out, width // TILE), group)


def _block(config: ModelConfig, group: str, experts: int) -> Iterator[tuple[str, TensorSpec]]:
    """What every block has, draft blocks included."""
    c, hidden, hc = config, config.hidden_size, config.hc_mult
    inner = c.moe_intermediate_size
    grouped = c.o_groups * c.o_lora_rank
    heads_width = c.num_attention_heads * c.head_dim
    mixes = (2 + hc) * hc
    # An expert's three weights are neighbours in the release, and so are its three scales.
    for expert in range(experts):
        base = f"{group}.ffn.experts.{expert}"
        parts = [
            *_fp4(f"{base}.w1", inner, hidden, group),
            *_fp4(f"{base}.w3", inner, hidden, group),
            *_fp4(f"{base}.w2", hidden, inner, group),
        ]
        yield from (item for item in parts if item[0].endswith(".weight"))
        yield from (item for item in parts if item[0].endswith(".scale"))
    for norm in ("attn_norm", "ffn_norm"):
        yield f"{group}.{norm}.weight", TensorSpec("BF16", (hidden,), group)
    for side in ("attn", "ffn"):
        yield f"{group}.hc_{side}_fn", TensorSpec("F32", (mixes, hc * hidden), group)
        yield f"{group}.hc_{side}_base", TensorSpec("F32", (mixes,), group)
        yield f"{group}.hc_{side}_scale", TensorSpec("F32", (3,), group)
    yield f"{group}.attn.attn_sink", TensorSpec("F32", (c.num_attention_heads,), group)
    yield from _fp8(f"{group}.attn.wq_a", c.q_lora_rank, hidden, group)
    yield f"{group}.attn.q_norm.weight", TensorSpec("BF16", (c.q_lora_rank,), group)
    yield from _fp8(f"{group}.attn.wq_b", heads_width, c.q_lora_rank, group)
    yield from _fp8(f"{group}.attn.wkv", c.head_dim, hidden, group)
    yield f"{group}.attn.kv_norm.weight", TensorSpec("BF16", (c.head_dim,), group)
    yield from _fp8(f"{group}.attn.wo_a", grouped, heads_width // c.o_groups, group)
    yield from _fp8(f"{group}.attn.wo_b", hidden, grouped, group)
    yield f"{group}.ffn.gate.weight", TensorSpec("BF16", (experts, hidden), group)
    yield f"{group}.ffn.gate.bias", TensorSpec("F32", (experts,), group)
    yield f"{group}.ffn.gate.bias_vl", TensorSpec("F32", (experts,), group)
    yield from _fp8(f"{group}.ffn.shared_experts.w1", inner, hidden, group)
    yield from _fp8(f"{group}.ffn.shared_experts.w3", inner, hidden, group)
    yield from _fp8(f"{group}.ffn.shared_experts.w2", hidden, inner, group)


def _sources(config: ModelConfig, layer: int, group: str) -> Iterator[tuple[str, TensorSpec]]:
    """The compressor of a kv source and the indexer of an index source."""
    c, hidden, base = config, config.hidden_size, f"{group}.attn"
    owns_kv = layer in c.kv_source_layer_ids
    if owns_kv:
        projection = TensorSpec("BF16", (c.head_dim, hidden), group)
        yield f"{base}.compressor.wkv.weight", projection
        if c.compress_ratios[layer] > 1:
            yield f"{base}.compressor.wgate.weight", projection
        yield f"{base}.compressor.norm.weight", TensorSpec("BF16", (c.head_dim,), group)
    if layer in c.index_source_layer_ids:
        width = c.index_n_heads * c.index_head_dim
        yield from _fp8(f"{base}.indexer.wq_b", width, c.q_lora_rank, group)
        weights = TensorSpec("BF16", (c.index_n_heads, hidden), group)
        yield f"{base}.indexer.weights_proj.weight", weights
        if owns_kv:
            key = TensorSpec("BF16", (c.index_head_dim, c.head_dim), group)
            yield f"{base}.indexer.wk.weight", key
            yield f"{base}.indexer.k_norm.weight", TensorSpec("BF16", (c.index_head_dim,), group)


def _draft_ends(config: ModelConfig, draft: int, group: str) -> Iterator[tuple[str, TensorSpec]]:
    """What only the first and the last draft block have."""
    hidden, rank = config.hidden_size, config.dspark_markov_rank
    if draft == 0:
        targets = len(config.dspark_target_layer_ids)
        yield from _fp8(f"{group}.main_proj", hidden, hidden * targets, group)
        yield f"{group}.main_norm.weight", TensorSpec("BF16", (hidden,), group)
    if draft == config.num_nextn_predict_layers - 1:
        table = TensorSpec("BF16", (config.vocab_size, rank), group)
        yield f"{group}.norm.weight", TensorSpec("BF16", (hidden,), group)
        yield f"{group}.markov_head.embed.weight", table
        yield f"{group}.markov_head.head.weight", table
        yield (
            f"{group}.confidence_head.proj.weight",
            TensorSpec("BF16", (1, hidden + rank), group),
        )


def _engram(config: ModelConfig, layer: int, rows: int) -> Iterator[tuple[str, TensorSpec]]:
    c, base, group = config, f"layers.{layer}.engram", f"engram.{layer}"
    width = c.engram_head_dim
    yield from _pair(f"{base}.embed", "F8_E4M3", (rows, width), (rows, width // TILE), group)
    yield from _fp8(f"{base}.wkv", c.hidden_size * (c.hc_mult + 1), c.engram_width, group)
    gates = TensorSpec("BF16", (c.hc_mult, c.hidden_size), group)
    yield f"{base}.q_weight", gates
    yield f"{base}.k_weight", gates
