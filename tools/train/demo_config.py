"""The demo model's shape: the released pattern at a size that a repository can hold.

Owns the one place where its numbers are chosen, in the released `config.json` layout. What depends
on the tokenizer (classes of the compressed vocabulary) is passed in; what follows from other keys
(engram rows) is derived.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engram_io.hashing import table_primes
from protocol.config import ModelConfig

MODEL_TEXT_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 4096,
    "hidden_size": 256,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 64,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0],
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 4, 7],
    "index_source_layer_ids": [2, 4, 7, 9],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "candidate_source_layer_id": 7,
    "candidate_topk_blocks": 16,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 12600,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [9, 10, 11],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}


def config_file(
    text_config: dict[str, Any], compressed_vocab: int, noise_token: int, image_token: int
) -> dict[str, Any]:
    """The whole `config.json` object; `engram_num_embeddings` is the sum of each layer's primes."""
    text = dict(text_config)
    primes = table_primes(
        len(text["engram_layer_ids"]),
        text["engram_max_ngram_size"] - 1,
        text["engram_n_heads"],
        text["engram_vocab_size"],
    )
    text["engram_num_embeddings"] = [int(layer.sum()) for layer in primes]
    text["engram_compressed_vocab_size"] = compressed_vocab
    text["dspark_noise_token_id"] = noise_token
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "transformers_version": "5.6.0",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": image_token,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }


def without_engram(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with no engram layer, for the comparison at equal steps."""
    text = {**config["text_config"], "engram_layer_ids": [], "engram_num_embeddings": []}
    return {**config, "text_config": text}


def parse(config: dict[str, Any]) -> ModelConfig:
    """Checked as a checkpoint's would be; raises CheckpointError."""
    return ModelConfig.from_dict(config, Path("config.json"))
