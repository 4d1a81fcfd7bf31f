"""The shapes of synthetic checkpoints: the released `config.json`, presets, and changes to them.

Owns the released values and the rule by which their layer pattern extends to other depths. What
follows from the tokenizer or from other keys is filled in here too, so that the result always
passes `ModelConfig`'s checks or raises CheckpointError saying which value does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from engram_io.hashing import table_primes
from engram_io.token_map import TokenMap
from launch.synth.tokenizer import BOS, EOS, IMAGE, NOISE, PAD
from protocol.errors import UsageError

RELEASED: dict[str, Any] = {
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
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}

# The shape of the checkpoint that the golden data was made with: every kind of layer, 3.4 MB.
MINI: dict[str, Any] = {
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
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [2, 5],
    "index_source_layer_ids": [2, 5, 6],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "engram_layer_ids": [1, 3],
    "engram_vocab_size": 200,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 3,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}

LEAST_LAYERS = 4


def layer_pattern(layers: int, drafts: int) -> dict[str, Any]:
    """The released pattern at another depth: two window-only layers, ratio 2 up to the middle with
    a new kv source every six, ratio 1 from there with a new index source every four.

    Gives the released values for 40 layers and 3 drafts. Raises UsageError for too few layers.
    """
    if layers < LEAST_LAYERS:
        raise UsageError(f"--layers is {layers}, the pattern needs at least {LEAST_LAYERS}")
    middle = layers - layers // 2
    sources = [*range(2, middle, 6), middle]
    return {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": drafts,
        "compress_ratios": [0] * 2 + [2] * (middle - 2) + [1] * (layers - middle) + [0] * drafts,
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": [*sources, *range(middle + 4, layers, 4)],
        "candidate_source_layer_id": middle,
        "engram_layer_ids": [1, sources[-2] if len(sources) > 1 else middle],
        "dspark_target_layer_ids": list(range(max(0, layers - 3), layers)),
    }


def wide(layers: int = 6, experts: int = 16, drafts: int = 0) -> dict[str, Any]:
    """The released widths with fewer layers and experts and small engram tables."""
    pattern = layer_pattern(layers, drafts)
    return {**pattern, "n_routed_experts": experts, "engram_vocab_size": 4000}


def text_config(
    preset: str,
    *,
    layers: int | None = None,
    experts: int | None = None,
    drafts: int | None = None,
    changes: Sequence[str] = (),
) -> dict[str, Any]:
    """`text_config` of a preset (`mini` or `wide`) with `KEY=VALUE` changes (JSON values).

    Raises UsageError for a key the release does not have or a value that is not JSON.
    """
    text = {**RELEASED, **(MINI if preset == "mini" else wide())}
    if layers is not None or drafts is not None:
        depth = text["num_hidden_layers"] if layers is None else layers
        tail = text["num_nextn_predict_layers"] if drafts is None else drafts
        text |= layer_pattern(depth, tail)
    if experts is not None:
        text["n_routed_experts"] = experts
    for change in changes:
        key, _, value = change.partition("=")
        if key not in RELEASED:
            raise UsageError(f"--set {change}: text_config of a V4.1 config.json has no key {key}")
        try:
            text[key] = json.loads(value)
        except ValueError:
            raise UsageError(f"--set {change}: {value!r} is not a JSON value") from None
    return text


def config_file(text: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The whole `config.json` object for `text`, with what follows from it and from `tokenizer`:
    table sizes (each the sum of its layer's primes), the compressed vocabulary, special ids."""
    primes = table_primes(
        len(text["engram_layer_ids"]),
        text["engram_max_ngram_size"] - 1,
        text["engram_n_heads"],
        text["engram_vocab_size"],
    )
    derived = {
        "engram_num_embeddings": [int(layer.sum()) for layer in primes],
        "engram_compressed_vocab_size": TokenMap.from_tokenizer(tokenizer, text["vocab_size"]).size,
        "engram_pad_token_id": tokenizer.token_to_id(PAD),
        "dspark_noise_token_id": tokenizer.token_to_id(NOISE),
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "transformers_version": "5.6.0",
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {**text, **derived},
    }
