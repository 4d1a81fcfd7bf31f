"""What a decode step of one token writes besides the sequence's state, allocated once.

Owns shapes and types. Addresses never change but those of `scores` and `blocks`, which grow with
the sequence (`fit`): whoever has baked addresses compares them.
"""

from __future__ import annotations

import torch

from compute.kernels.attention import AttentionScratch
from compute.kernels.hyper_connections import SUMS, mix_splits
from compute.kernels.limbs import Limbs
from compute.sequence import SequenceState
from protocol.config import ModelConfig

# Shares of K that short products are split into, so that they fill a GPU; measured on an H200.
DOWN_SPLITS = 5
GATE_SPLITS = 10
COMPRESSOR_SPLITS = 8


class Mix:
    """fp32 `pre` and `post` [1, hc], `comb` [1, hc, hc] of one sublayer."""

    def __init__(self, hc: int, device: torch.device) -> None:
        self.pre = torch.zeros(1, hc, device=device)
        self.post = torch.zeros(1, hc, device=device)
        self.comb = torch.zeros(1, hc, hc, device=device)


class Buffers:
    """`inputs` int64 [4] holds what the host says of a token: its id, its position, and, where it
    is one graph, what its records are marked with and whether a wait of it ran out.

    `routed` int32 [k + 2 p] holds a layer's `ids` [1, k] and, of the next layer, `predicted` [p]
    and the bits of fp32 `margins` [p]: one read-back gives all."""

    def __init__(self, config: ModelConfig, device: torch.device, predictions: int) -> None:
        def bf16(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=device)

        def fp32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=device)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        width, hc, inner = config.hidden_size, config.hc_mult, config.moe_intermediate_size
        heads, head_dim = config.num_attention_heads, config.head_dim
        window, k = config.sliding_window, config.num_experts_per_tok
        self.ratios = sorted({config.compress_ratios[at] for at in config.kv_source_layer_ids})
        turns, pairs = 2 + len(self.ratios), config.qk_rope_head_dim // 2
        # Of the token as such.
        self.inputs = ints(4, dtype=torch.int64)
        self.token, self.position, self.tag, self.given_up = self.inputs.split(1)
        self.ratio_values = torch.tensor(self.ratios, dtype=torch.int64, device=device)
        self.cos, self.sin = fp32(turns, pairs), fp32(turns, pairs)
        self.slot, self.window_index = ints(1), ints(1, window)
        self.visible = ints(len(self.ratios))
        self.streams, self.collapsed = bf16(1, hc, width), bf16(1, width)
        # Of a sublayer.
        self.mixes = (Mix(hc, device), Mix(hc, device))
        self.mix_sums = fp32(mix_splits(hc * width), 1, SUMS)
        self.x, self.rounded = bf16(1, width), bf16(1, width)
        self.x_limbs = Limbs.empty(1, width, device)
        # Of attention.
        self.down = fp32(DOWN_SPLITS, 1, config.q_lora_rank + head_dim)
        self.latent, self.query = bf16(1, config.q_lora_rank), bf16(1, heads, head_dim)
        self.shares = fp32(COMPRESSOR_SPLITS, 1, 2 * head_dim)
        self.row_latent = bf16(1, head_dim)
        self.key_shares = fp32(COMPRESSOR_SPLITS, 1, config.index_head_dim)
        index = (1, config.index_n_heads, config.index_head_dim)
        self.raw_index_query, self.index_query = bf16(*index), bf16(*index)
        self.raw_index_weights = bf16(1, config.index_n_heads)
        self.index_weights = bf16(1, config.index_n_heads)
        self.scores, self.blocks = bf16(1, 0), ints(1, 0, dtype=torch.uint8)
        self.block_size = config.candidate_block_size
        self.chosen = ints(1, config.index_topk)
        self.no_choice = ints(1, 0)
        # Sized for the layers that read compressed rows; those without use the beginning.
        slots = window + config.index_topk
        self.attention = AttentionScratch.empty(1, slots, heads, head_dim, device)
        self.attended = bf16(1, heads, head_dim)
        self.grouped = bf16(1, config.o_groups * config.o_lora_rank)
        # Of the experts.
        self.gate_logits = fp32(GATE_SPLITS, 1, 2 * config.n_routed_experts)
        self.routed = ints(k + 2 * predictions)
        self.ids = self.routed[:k].view(1, k)
        self.predicted = self.routed[k : k + predictions]
        self.margins = self.routed[k + predictions :].view(torch.float32)
        self.weights = fp32(1, k)
        self.table = ints(k, 6, dtype=torch.int64)
        self.inner, self.inner_limbs = bf16(k, inner), Limbs.empty(k, inner, device)
        self.outputs = bf16(1, k, width)
        self.shared_inner, self.shared = bf16(1, inner), bf16(1, width)
        # Of the engram: a layer's codes, and behind them its scales.
        rows, columns = config.engram_rows_per_token, config.engram_head_dim
        codes, scales = rows * columns, rows * columns // 32
        self.engram = ints(len(config.engram_layer_ids), codes + scales, dtype=torch.uint8)
        self.engram_codes = [layer[:codes].view(1, rows, columns) for layer in self.engram]
        self.engram_scales = [layer[codes:].view(1, rows, columns // 32) for layer in self.engram]
        self.engram_rounded = bf16(1, config.engram_width)
        self.key_value = bf16(1, (hc + 1) * width)
        # Of the head.
        self.logits = fp32(1, 1, config.vocab_size)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them but what the host writes, by name."""
        found: dict[str, torch.Tensor] = {}
        for name, value in vars(self).items():
            parts = value if isinstance(value, (tuple, list)) else [value]
            for at, part in enumerate(parts):
                inside = vars(part) if isinstance(part, Mix) else {"": part}
                for inner, tensor in inside.items():
                    if isinstance(tensor, torch.Tensor):
                        found[f"{name}.{at}{inner}"] = tensor
        return found

    def fit(self, state: SequenceState) -> None:
        """Have room to score every row that `state` has room for."""
        rows = max((held.capacity for held in state.index_keys.values()), default=0)
        if rows > self.scores.shape[1]:
            self.scores = self.scores.new_zeros(1, rows)
            self.blocks = self.blocks.new_zeros(1, -(-rows // self.block_size))
