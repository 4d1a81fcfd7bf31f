"""A config.json is what the engine computes, or is refused by the key that differs."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from protocol.config import ModelConfig
from protocol.errors import CheckpointError
from protocol.shards import read_header

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"


def _mini() -> dict[str, Any]:
    whole: dict[str, Any] = json.loads((MINI / "config.json").read_text())
    return whole


def _read(whole: Any) -> ModelConfig:
    return ModelConfig.from_dict(whole, Path("DIR/config.json"))


def test_the_golden_config_reads_as_it_is_written() -> None:
    config = ModelConfig.load(MINI)
    text = _mini()["text_config"]
    for name in ("hidden_size", "n_routed_experts", "engram_vocab_size", "hc_eps", "rms_norm_eps"):
        assert getattr(config, name) == text[name]
    assert config.compress_ratios == tuple(text["compress_ratios"])
    assert isinstance(config.rope_theta, float) and isinstance(config.rope_scaling.factor, float)
    assert config.image_token_id == _mini()["image_token_id"]


def test_each_layer_reads_the_source_nearest_before_it() -> None:
    config = ModelConfig.load(MINI)
    layers = range(config.num_hidden_layers)
    assert [config.kv_source(layer) for layer in layers] == [None, None, 2, 2, 2, 5, 5, 5]


@pytest.mark.parametrize("key", sorted(_mini()["text_config"].keys() & set(ModelConfig.__slots__)))
def test_a_missing_key_is_named(key: str) -> None:
    whole = _mini()
    del whole["text_config"][key]
    with pytest.raises(CheckpointError, match=rf"DIR/config.json: {key} is missing"):
        _read(whole)


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"])
def test_a_missing_top_level_key_is_named(key: str) -> None:
    whole = _mini()
    del whole[key]
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        _read(whole)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "deepseek_v3", "llama", None, 41])
def test_another_architecture_is_refused(model_type: Any) -> None:
    with pytest.raises(CheckpointError, match=r"model_type is .* runs 'deepseek_v41' only"):
        _read({**_mini(), "model_type": model_type})


@pytest.mark.parametrize(
    "where, key, value",
    [
        ("quantization_config", "expert_dtype", "fp8"),
        ("quantization_config", "scale_fmt", "float"),
        ("quantization_config", "weight_block_size", [128, 128]),
        ("text_config", "scoring_func", "sigmoid"),
        ("text_config", "n_shared_experts", 2),
        ("text_config", "norm_topk_prob", False),
    ],
)
def test_other_arithmetic_is_refused(where: str, key: str, value: Any) -> None:
    whole = _mini()
    whole[where][key] = value
    with pytest.raises(CheckpointError, match=rf"{where}.{key} is .* only .* is supported"):
        _read(whole)


@pytest.mark.parametrize(
    "key, value, complaint",
    [
        ("hidden_size", "128", "expected a whole number"),
        ("hidden_size", 128.0, "expected a whole number"),
        ("hidden_size", True, "expected a whole number"),
        ("hidden_size", -1, "expected a whole number"),
        ("hidden_size", 0, "expected more than 0"),
        ("hidden_size", 130, "multiple of 32"),
        ("hc_eps", "1e-6", "expected float"),
        ("compress_ratios", 2, "expected a list of whole numbers"),
        ("compress_ratios", [0, 0, 2], "has 3 entries, expected 10"),
        ("rope_scaling", None, "rope_scaling is None"),
        ("rope_scaling", {"rope_type": "linear"}, "expected 'yarn'"),
        ("rope_scaling", {"rope_type": "yarn"}, "factor is missing"),
        ("kv_source_layer_ids", [5], "layer 2 has compress ratio 2 but no kv source"),
        ("kv_source_layer_ids", [2], "layer 5 has compress ratio 1 but its kv source, layer 2"),
        ("kv_source_layer_ids", [0, 2, 5], "layer 0 is a source but its compress ratio is 0"),
        ("kv_source_layer_ids", [5, 2], "expected ascending layer ids"),
        ("index_source_layer_ids", [5, 6], "no index source"),
        ("index_source_layer_ids", [2, 6], "its index source is the earlier layer 2"),
        ("index_source_layer_ids", [2, 5, 99], "below 8"),
        ("num_experts_per_tok", 17, "more than the 16 experts"),
        ("qk_rope_head_dim", 33, "expected an even number"),
        ("qk_rope_head_dim", 128, "expected an even number"),
        ("o_groups", 3, "not a multiple of o_groups 3"),
        ("engram_num_embeddings", [1362], "has 1 entries for 2 engram layers"),
        ("engram_pad_token_id", 512, "outside the vocabulary of 512"),
    ],
)
def test_a_value_that_does_not_fit_is_said_with_what_was_expected(
    key: str, value: Any, complaint: str
) -> None:
    whole = _mini()
    whole["text_config"][key] = value
    with pytest.raises(CheckpointError, match=complaint) as caught:
        _read(whole)
    assert "DIR/config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_value_of_any_wrong_kind_is_refused_and_nothing_else_happens() -> None:
    draw = random.Random(5)
    keys = sorted(_mini()["text_config"].keys() & set(ModelConfig.__slots__))
    for _ in range(2000):
        whole = _mini()
        value = draw.choice([None, "x", -7, 1.5, [], [None], {}, True, 1 << 80, [[1]]])
        whole["text_config"][draw.choice(keys)] = value
        try:
            _read(whole)
        except CheckpointError as error:
            assert str(error).startswith("DIR/config.json: ")


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[]", "expected a JSON object"),
        (b"{}", "model_type is None"),
    ],
)
def test_a_file_that_is_no_config_is_refused(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_a_number_that_is_not_finite_is_computed_with(value: float) -> None:
    for key in ("rope_theta", "swiglu_limit", "routed_scaling_factor"):
        whole = _mini()
        whole["text_config"][key] = value
        with pytest.raises(CheckpointError, match=rf"DIR/config.json: {key} is"):
            _read(whole)


@pytest.mark.parametrize(
    "key",
    [
        "n_routed_experts",
        "dspark_n_routed_experts",
        "num_nextn_predict_layers",
        "hc_sinkhorn_iters",
        "sliding_window",
        "compress_ratios",
        "max_position_embeddings",
        "index_topk",
        "candidate_topk_blocks",
        "candidate_block_size",
        "dspark_block_size",
        "engram_vocab_size",
    ],
)
def test_a_count_without_end_is_counted_to_or_allocated_for(key: str) -> None:
    whole = _mini()
    listed = isinstance(whole["text_config"][key], list)
    whole["text_config"][key] = [10**12] * 10 if listed else 10**12
    with pytest.raises(CheckpointError, match=f"{key} is 1000000000000, expected at most"):
        _read(whole)


def test_a_number_that_no_machine_word_holds_is_computed_with() -> None:
    counts = [key for key, kind in ModelConfig.__annotations__.items() if kind == "int"]
    for key in counts:
        whole = _mini()
        holder = whole if key in whole else whole["text_config"]
        holder[key] = 1 << 63
        with pytest.raises(CheckpointError, match=f"{key} is {1 << 63}, expected a whole number"):
            _read(whole)
    whole = _mini()
    whole["text_config"]["compress_ratios"][-1] = 1 << 63
    with pytest.raises(CheckpointError, match=r"compress_ratios .* expected a list of whole"):
        _read(whole)


@pytest.mark.parametrize("key", ["rope_theta", "compress_rope_theta"])
def test_frequencies_that_overflow_are_computed_with(key: str) -> None:
    whole = _mini()
    whole["text_config"][key] = 1e-300
    with pytest.raises(CheckpointError, match=f"{key} is 1e-300, expected at least 1"):
        _read(whole)


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
def test_a_rope_scaling_by_nothing_is_computed_with(key: str) -> None:
    whole = _mini()
    whole["text_config"]["rope_scaling"][key] = 0
    with pytest.raises(CheckpointError, match=rf"rope_scaling.{key} is 0.*, expected more than 0"):
        _read(whole)


def test_a_pipe_or_a_device_in_place_of_a_file_is_read_without_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "shard").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read .not a file"):
        ModelConfig.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"shard: cannot be read .not a file"):
        read_header(tmp_path / "shard")
