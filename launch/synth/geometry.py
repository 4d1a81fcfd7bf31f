"""What a synthetic checkpoint looks like: presets, overrides, and the fields that follow.

`mini` is small enough for tests, `wide` has the released widths. The layer pattern scales with the
number of layers as the release has it: two window-only layers, ratio 2 up to the middle, ratio 1
after it; engram rows in the second layer and about a third of the way through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engram_io.hashing import table_primes
from protocol.errors import UsageError

LEAST_LAYERS = 3  # two with a window only and one with compressed KV

_RELEASED: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_rope_theta": 160000,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}

_MINI: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "sliding_window": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "engram_vocab_size": 200,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 3,
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}

# A few layers and experts at the released widths; --layers, --experts and --set ask for more.
_WIDE: dict[str, Any] = {
    "vocab_size": 4096,
    "num_hidden_layers": 4,
    "n_routed_experts": 16,
    "engram_vocab_size": 20000,
    "num_nextn_predict_layers": 1,
    "dspark_n_routed_experts": 4,
}

PRESETS = {"mini": _MINI, "wide": _WIDE, "released": {}}


def text_config(preset: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A complete `text_config` but for the tokenizer's class count. Raises UsageError."""
    unknown = sorted(set(changes) - set(_RELEASED))
    if unknown:
        raise UsageError(f"no such config key: {', '.join(unknown)}")
    for key, value in changes.items():
        released = _RELEASED[key]
        # A whole number is a fine float, as in the release's own file.
        if type(value) is not type(released) and (type(released), type(value)) != (float, int):
            raise UsageError(f"{key} is {value!r}, expected something like {released!r}")
    text = {**_RELEASED, **PRESETS[preset], **changes}
    layers = text["num_hidden_layers"]
    if layers < LEAST_LAYERS:
        raise UsageError(f"{layers} layers are too few; give at least {LEAST_LAYERS}")
    text |= _layer_pattern(layers, text["num_nextn_predict_layers"])
    engram_layers = [1, max(2, round(layers * 0.35))]
    lengths = text["engram_max_ngram_size"] - 1
    primes = table_primes(
        len(engram_layers), lengths, text["engram_n_heads"], text["engram_vocab_size"]
    )
    text["engram_layer_ids"] = engram_layers
    text["engram_num_embeddings"] = [int(table.sum()) for table in primes]
    text["dspark_noise_token_id"] = text["vocab_size"] - 1
    return text


def _layer_pattern(layers: int, drafts: int) -> dict[str, Any]:
    middle = max(2, layers // 2)
    by_two = list(range(2, middle, 6))
    by_one = range(middle, layers, max(2, layers // 10))
    return {
        "compress_ratios": [0] * 2 + [2] * (middle - 2) + [1] * (layers - middle) + [0] * drafts,
        "kv_source_layer_ids": [*by_two, middle],
        "index_source_layer_ids": [*by_two, *by_one],
        "candidate_source_layer_id": middle,
        "dspark_target_layer_ids": list(range(max(0, layers - 3), layers)),
    }


def config_json(text: Mapping[str, Any], image_token_id: int) -> dict[str, Any]:
    """The whole `config.json`, text only."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": image_token_id,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": dict(text),
    }
