"""The demo checkpoint's files: shards laid out as the release's, index, config and tokenizer.

Owns only the order of shards; which tensor goes into which comes from `protocol.tensor_table`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from protocol.shards import INDEX_NAME
from protocol.tensor_table import expected_tensors
from tools.train.checkpoint import Stored
from tools.train.demo_config import parse

COPIED = ("tokenizer.json", "tokenizer_config.json")


def write_checkpoint(directory: Path, config: dict[str, Any], data: Path, stored: Stored) -> None:
    """Write everything that a checkpoint's directory holds; an existing one is replaced."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    groups: dict[str, list[str]] = {}
    for name, spec in expected_tensors(parse(config)).items():
        groups.setdefault(spec.group, []).append(name)
    weight_map = {}
    for number, names in enumerate(groups.values(), 1):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({name: stored[name].contiguous() for name in names}, directory / shard)
        weight_map.update(dict.fromkeys(names, shard))
    total = sum(tensor.nbytes for tensor in stored.values())
    _write_json(
        directory / INDEX_NAME,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {
            "_from_model_config": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
        },
    )
    for name in COPIED:
        shutil.copy(data / name, directory / name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
