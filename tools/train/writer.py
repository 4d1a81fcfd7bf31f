"""Puts the demo checkpoint's files together: the engine's own writer, and what goes beside the
shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from launch.synth.writer import write_checkpoint as write_released
from tools.train.checkpoint import Stored

COPIED = ("tokenizer.json", "tokenizer_config.json")
GENERATION = {
    "_from_model_config": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
}


def write_checkpoint(directory: Path, config: dict[str, Any], data: Path, stored: Stored) -> None:
    """Write everything that a checkpoint's directory holds; an existing one is replaced.

    `data` holds the tokenizer's files, `stored` every tensor in its stored format.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    documents = {name: (data / name).read_text(encoding="utf-8") for name in COPIED}
    documents["generation_config.json"] = json.dumps(GENERATION, indent=2) + "\n"
    write_released(
        directory,
        config,
        documents,
        lambda name, spec: [stored[name].contiguous().view(torch.uint8).numpy().tobytes()],
    )
