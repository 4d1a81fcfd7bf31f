"""What a checkpoint's `config.json` says, checked.

Owns the mapping from the released nested file to `ModelConfig` and the rules that make it
consistent. It knows nothing of tensors: `protocol.tensor_table` derives them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import CheckpointError

MODEL_TYPE = "deepseek_v41"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters, used by layers whose compress ratio is not 0."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A DeepSeek-V4.1 text model; names and units are those of the released `config.json`.

    `compress_ratios` has one entry a backbone layer and then one a draft layer.
    """

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    compress_rope_theta: float
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    @property
    def engram_rows_per_token(self) -> int:
        """Rows one token looks up in one engram layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def engram_width(self) -> int:
        """Columns of one token's concatenated engram rows."""
        return self.engram_rows_per_token * self.engram_head_dim

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV `layer` reads; None where its window is all it sees."""
        if self.compress_ratios[layer] == 0:
            return None
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Read and check `directory/config.json`; raises CheckpointError."""
        path = directory / "config.json"
        return cls.from_dict(read_json_object(path), path)

    @classmethod
    def from_dict(cls, top: Mapping[str, Any], path: Path) -> ModelConfig:
        """Build from the parsed file; `path` is only for messages. Raises CheckpointError."""
        model_type = top.get("model_type")
        if model_type != MODEL_TYPE:
            raise CheckpointError(
                f"{path}: model_type is {model_type!r}, Headrace runs {MODEL_TYPE!r} only; "
                "use a DeepSeek-V4.1 checkpoint"
            )
        _require_formats(top, path)
        text = top.get("text_config")
        if not isinstance(text, Mapping):
            raise CheckpointError(f"{path}: text_config is missing; expected an object")
        values: dict[str, Any] = {}
        for name, kind in cls.__annotations__.items():
            holder = top if name in _TOP_LEVEL else text
            values[name] = _typed(holder, name, kind, path)
        config = cls(**values)
        _check_consistent(config, path)
        return config


# Far above any of the release's figures, and not infinite. No comparison holds for NaN.
_LARGEST_FLOAT = 1e30
# The same for counts and ids: a product of a few still fits into 64 bits.
_LARGEST_COUNT = 1 << 40
_TOP_LEVEL = {"bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"}
_FORMATS = {
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_ARITHMETIC = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
}


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises CheckpointError where there is none."""
    if not os.path.isdir(path.parent):
        raise CheckpointError(f"{path.parent}: no such directory; give a checkpoint's directory")
    require_file(path)
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; is this a checkpoint's directory?") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error}); fetch the file again") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: holds {type(parsed).__name__}, expected a JSON object")
    return parsed


def require_file(path: Path, error: type[Exception] = CheckpointError) -> None:
    """Raises `error` where `path` is a directory, a pipe or a device, whose reading could be
    without end. One that is missing is the reader's to report."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise error(f"{path}: cannot be read (not a file)")


def _require_formats(top: Mapping[str, Any], path: Path) -> None:
    quantization = top.get("quantization_config")
    if not isinstance(quantization, Mapping):
        raise CheckpointError(
            f"{path}: quantization_config is missing; expected fp8 with fp4 experts"
        )
    text = top.get("text_config")
    for where, holder, expected in (
        ("quantization_config", quantization, _FORMATS),
        ("text_config", text if isinstance(text, Mapping) else {}, _ARITHMETIC),
    ):
        for key, value in expected.items():
            # Released files always state these; a different value means other arithmetic.
            if holder.get(key, value) != value:
                raise CheckpointError(
                    f"{path}: {where}.{key} is {holder[key]!r}, only {value!r} is supported"
                )


def _typed(holder: Mapping[str, Any], name: str, kind: str, path: Path) -> Any:
    if name not in holder:
        raise CheckpointError(f"{path}: {name} is missing; expected {kind}")
    value = holder[name]
    if kind == "int" and _is_count(value):
        return value
    if kind == "float" and type(value) in (int, float) and abs(value) < _LARGEST_FLOAT:
        return float(value)
    if kind == "tuple[int, ...]" and isinstance(value, list) and all(map(_is_count, value)):
        return tuple(value)
    if kind == "RopeScaling" and isinstance(value, Mapping):
        if value.get("rope_type", "yarn") != "yarn":
            raise CheckpointError(
                f"{path}: rope_scaling.rope_type is {value['rope_type']!r}, expected 'yarn'"
            )
        return RopeScaling(
            **{key: _typed(value, key, of, path) for key, of in RopeScaling.__annotations__.items()}
        )
    expected = {"tuple[int, ...]": "a list of whole numbers", "int": "a whole number up to 2^40"}
    raise CheckpointError(f"{path}: {name} is {value!r}, expected {expected.get(kind, kind)}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_COUNT


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "max_position_embeddings",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "engram_max_ngram_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_vocab_size",
    "engram_compressed_vocab_size",
    "rms_norm_eps",
)


# Numbers that no tensor's shape would contradict, or not before they had been counted up to: memory
# and time go with them. Far above the release's.
_AT_MOST = {
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 14,
    "compress_ratios": 1 << 14,
    "index_topk": 1 << 16,
    "candidate_topk_blocks": 1 << 16,
    "candidate_block_size": 1 << 16,
    "dspark_block_size": 1 << 10,
    "engram_vocab_size": 1 << 32,
    "n_routed_experts": 65_536,
    "dspark_n_routed_experts": 65_536,
    "num_nextn_predict_layers": 64,
    "hc_sinkhorn_iters": 1_000,
}


def _check_consistent(config: ModelConfig, path: Path) -> None:
    def require(holds: bool, message: str) -> None:
        if not holds:
            raise CheckpointError(f"{path}: {message}")

    for name in _POSITIVE:
        require(
            getattr(config, name) > 0, f"{name} is {getattr(config, name)}, expected more than 0"
        )
    for name in RopeScaling.__annotations__:
        found = getattr(config.rope_scaling, name)
        require(found > 0, f"rope_scaling.{name} is {found}, expected more than 0")
    factor = config.rope_scaling.factor
    require(factor >= 1, f"rope_scaling.factor is {factor}, expected at least 1")
    for name in ("rope_theta", "compress_rope_theta"):
        found = getattr(config, name)
        # Powers of less overflow.
        require(found >= 1, f"{name} is {found}, expected at least 1")
    for name, most in _AT_MOST.items():
        value = getattr(config, name)
        found = max(value, default=0) if isinstance(value, tuple) else value
        require(found <= most, f"{name} is {found}, expected at most {most}")
    layers = config.num_hidden_layers
    wanted = layers + config.num_nextn_predict_layers
    require(
        len(config.compress_ratios) in (layers, wanted),
        f"compress_ratios has {len(config.compress_ratios)} entries, expected {wanted} "
        f"({layers} layers and {config.num_nextn_predict_layers} draft layers)",
    )
    for name in (
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "engram_layer_ids",
        "dspark_target_layer_ids",
    ):
        ids = getattr(config, name)
        require(
            list(ids) == sorted(set(ids)) and all(i < layers for i in ids),
            f"{name} is {list(ids)}, expected ascending layer ids below {layers}",
        )
    for layer, ratio in enumerate(config.compress_ratios[:layers]):
        if ratio == 0:
            require(
                layer not in config.kv_source_layer_ids
                and layer not in config.index_source_layer_ids,
                f"layer {layer} is a source but its compress ratio is 0",
            )
            continue
        sources = [s for s in config.kv_source_layer_ids if s <= layer]
        require(
            bool(sources),
            f"layer {layer} has compress ratio {ratio} but no kv source at or before it",
        )
        require(
            config.compress_ratios[sources[-1]] == ratio,
            f"layer {layer} has compress ratio {ratio} but its kv source, layer {sources[-1]}, "
            f"has {config.compress_ratios[sources[-1]]}",
        )
        choosers = [s for s in config.index_source_layer_ids if s <= layer]
        require(
            bool(choosers),
            f"layer {layer} has compress ratio {ratio} but no index source at or before it",
        )
        require(
            choosers[-1] >= sources[-1],
            f"layer {layer} reads kv of layer {sources[-1]} but its index source "
            f"is the earlier layer {choosers[-1]}",
        )
    _check_divisibility(config, require)


def _check_divisibility(config: ModelConfig, require: Any) -> None:
    require(
        config.num_experts_per_tok <= config.n_routed_experts,
        f"num_experts_per_tok is {config.num_experts_per_tok}, "
        f"more than the {config.n_routed_experts} experts",
    )
    require(
        0 < config.qk_rope_head_dim <= config.head_dim and config.qk_rope_head_dim % 2 == 0,
        f"qk_rope_head_dim is {config.qk_rope_head_dim}, expected an even number "
        f"up to head_dim {config.head_dim}",
    )
    require(
        config.qk_rope_head_dim <= config.index_head_dim,
        f"qk_rope_head_dim {config.qk_rope_head_dim} is larger than "
        f"index_head_dim {config.index_head_dim}",
    )
    require(
        config.num_attention_heads % config.o_groups == 0,
        f"num_attention_heads {config.num_attention_heads} is not a multiple of "
        f"o_groups {config.o_groups}",
    )
    for name in (
        "hidden_size",
        "moe_intermediate_size",
        "head_dim",
        "q_lora_rank",
        "index_head_dim",
        "engram_head_dim",
    ):
        require(
            getattr(config, name) % 32 == 0,
            f"{name} is {getattr(config, name)}, expected a multiple of 32",
        )
    require(
        len(config.engram_layer_ids) == len(config.engram_num_embeddings),
        f"engram_num_embeddings has {len(config.engram_num_embeddings)} entries for "
        f"{len(config.engram_layer_ids)} engram layers",
    )
    for name in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "engram_pad_token_id",
        "dspark_noise_token_id",
    ):
        require(
            getattr(config, name) < config.vocab_size,
            f"{name} is {getattr(config, name)}, outside the vocabulary of {config.vocab_size}",
        )
