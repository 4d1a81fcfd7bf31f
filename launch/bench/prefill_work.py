"""What a prefill has to do, from the config and the number of tokens alone: bytes and operations.

Owns the arithmetic of `headrace bench prefill`. Bytes are those of the checkpoint's own formats, so
they are the same on every device. Counted is what the model defines for every token of the prompt:
weights and rows read once, however the prompt is cut; a multiplication and its addition as two
operations of every matrix product; the head for the last token. Not counted: what is elementwise
(norms, SwiGLU, Sinkhorn, softmax, rounding), what is written, and what one sublayer hands to the
next. So a floor made from it is one to approach rather than to reach; only leaving out what no
result depends on (index scores where every row is chosen, all but one token of the last layer)
would go below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from launch.synth.writer import nbytes
from protocol.config import ModelConfig
from protocol.tensor_table import (
    EXPERT_MATRICES,
    TILE,
    TensorSpec,
    expected_tensors,
    expert_tensor,
    kind_of,
)

BF16_BYTES = 2
# Stored with two dimensions and multiplied element by element.
_VECTORS = (".engram.q_weight", ".engram.k_weight")
#: Parts of a layer, in the order of `layer_work`; the head is a part of its own.
DENSE, EXPERTS, ATTENTION, INDEX, STREAMS, ENGRAM, HEAD = (
    "dense weights",
    "routed experts",
    "attention",
    "index scores",
    "streams",
    "engram rows",
    "head",
)


class Work(NamedTuple):
    """Bytes read and floating-point operations done."""

    nbytes: int
    flops: int

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The least time at these rates: reading and computing go on side by side."""
        return max(self.nbytes / bytes_per_s, self.flops / flops_per_s)


Parts = Mapping[str, Work]


def total(works: Iterable[Work]) -> Work:
    """All of them, one after another."""
    every = list(works)
    return Work(sum(work.nbytes for work in every), sum(work.flops for work in every))


def prefill_work(config: ModelConfig, tokens: int, distinct: Sequence[int]) -> list[Parts]:
    """Every layer's parts and then the head's, for a prompt of `tokens` from an empty sequence.

    `distinct` is how many different experts of each layer the prompt picks.
    """
    layers = range(config.num_hidden_layers)
    work: list[Parts] = [layer_work(config, layer, tokens, distinct[layer]) for layer in layers]
    return [*work, {HEAD: head_work(config, tokens)}]


def by_part(work: Sequence[Parts]) -> dict[str, Work]:
    """Sums over layers and head."""
    names = dict.fromkeys(name for parts in work for name in parts)
    return {name: total(parts[name] for parts in work if name in parts) for name in names}


def floor_seconds(work: Sequence[Parts], bytes_per_s: float, flops_per_s: float) -> float:
    """Sum over layers and head of max(bytes / bandwidth, operations / rate): within a layer reading
    hides behind computing or the other way round, and a layer needs what the one before gives."""
    return sum(total(parts.values()).seconds(bytes_per_s, flops_per_s) for parts in work)


def layer_work(config: ModelConfig, layer: int, tokens: int, distinct: int) -> dict[str, Work]:
    """One layer's parts, `distinct` of its experts being picked."""
    return {
        DENSE: dense_work(config, layer, tokens),
        EXPERTS: expert_work(config, layer, tokens, distinct),
        ATTENTION: attention_work(config, layer, tokens),
        INDEX: index_work(config, layer, tokens),
        STREAMS: stream_work(config, tokens),
        ENGRAM: engram_work(config, layer, tokens),
    }


def dense_work(config: ModelConfig, layer: int, tokens: int) -> Work:
    """Every dense tensor of the layer once, and 2 N K for each row that a matrix [N, K] multiplies.

    Rows are the tokens, except for the index keys' matrix, which multiplies one latent a group:
    floor(tokens / ratio). The projections of attention, compressor, indexer, gate, shared expert,
    engram and both hyper-connection mixes are all such matrices; wo_a [groups * rank, heads d /
    groups] is block-diagonal and stored without its zeros, so that the rule holds for it, too.
    """
    read, flops = 0, 0
    for name, spec in _dense_tensors(config)[layer]:
        read += nbytes(spec)
        if len(spec.shape) == 2 and spec.dtype != "F8_E8M0" and not name.endswith(_VECTORS):
            keys = name.endswith(".indexer.wk.weight")
            rows = tokens // config.compress_ratios[layer] if keys else tokens
            flops += 2 * rows * spec.shape[0] * spec.shape[1]
    return Work(read, flops)


def expert_work(config: ModelConfig, layer: int, tokens: int, distinct: int) -> Work:
    """`distinct` experts once; k picks a token, each through three matrices: 2 * 3 D I a pick."""
    table = expected_tensors(config)
    parts = [expert_tensor(layer, 0, m, p) for m in EXPERT_MATRICES for p in ("weight", "scale")]
    products = 2 * 3 * config.hidden_size * config.moe_intermediate_size
    picks = tokens * config.num_experts_per_tok
    return Work(distinct * sum(nbytes(table[name]) for name in parts), picks * products)


def attention_work(config: ModelConfig, layer: int, tokens: int) -> Work:
    """Scores and values of every query over its own slots: 2 * 2 heads d a slot.

    The query at position p has min(p + 1, window) slots of the window and min(visible, top-k)
    chosen rows, visible = floor((p + 1) / ratio). Read once: the layer's own bf16 rows of width d,
    and the floor(tokens / ratio) compressed ones.
    """
    ratio = config.compress_ratios[layer]
    slots = _sum_capped(tokens, 1, config.sliding_window)
    rows = tokens
    if ratio:
        slots += _sum_capped(tokens, ratio, config.index_topk)
        rows += tokens // ratio
    width = config.head_dim
    return Work(rows * width * BF16_BYTES, 4 * config.num_attention_heads * width * slots)


def index_work(config: ModelConfig, layer: int, tokens: int) -> Work:
    """Scores of every query against every row it may choose: 2 heads d of the index a row.

    All visible rows up to the candidate source, then at most the rows of the candidate blocks. Read
    once: floor(tokens / ratio) bf16 keys. Nothing in layers that choose no rows.
    """
    if layer not in config.index_source_layer_ids:
        return Work(0, 0)
    ratio, cap = config.compress_ratios[layer], tokens
    if layer > config.candidate_source_layer_id:
        cap = config.candidate_topk_blocks * config.candidate_block_size
    scored = _sum_capped(tokens, ratio, cap)
    width = config.index_head_dim
    read = tokens // ratio * width * BF16_BYTES
    return Work(read, 2 * config.index_n_heads * width * scored)


def stream_work(config: ModelConfig, tokens: int) -> Work:
    """The streams' products with `comb` [hc, hc] before and after the experts: 2 * 2 hc hc D.

    The matrices that make the mixes are dense weights.
    """
    return Work(0, tokens * 2 * 2 * config.hc_mult**2 * config.hidden_size)


def engram_work(config: ModelConfig, layer: int, tokens: int) -> Work:
    """A token's rows with their scales; what multiplies them is a dense weight."""
    if layer not in config.engram_layer_ids:
        return Work(0, 0)
    width = config.engram_head_dim
    return Work(tokens * config.engram_rows_per_token * (width + width // TILE), 0)


def head_work(config: ModelConfig, tokens: int) -> Work:
    """The tokens' embeddings, and the head for the last token: V D of bf16, 2 V D operations."""
    size = config.vocab_size * config.hidden_size
    rows = tokens * config.hidden_size + size + config.hidden_size
    return Work(rows * BF16_BYTES, 2 * size)


def _sum_capped(tokens: int, ratio: int, most: int) -> int:
    """Sum over positions p of min(floor((p + 1) / ratio), most)."""
    return sum(min(end // ratio, most) for end in range(1, tokens + 1))


@lru_cache(maxsize=4)
def _dense_tensors(config: ModelConfig) -> list[list[tuple[str, TensorSpec]]]:
    """(name, spec) of what a text prefill reads of each layer, routed experts and tables apart."""
    layers: list[list[tuple[str, TensorSpec]]] = [[] for _ in range(config.num_hidden_layers)]
    for name, spec in expected_tensors(config).items():
        of_layer = name.startswith("layers.") and kind_of(name) == "dense"
        # The bias for images chooses no text token's experts.
        if of_layer and not name.endswith(".bias_vl"):
            layers[int(name.split(".")[1])].append((name, spec))
    return layers
