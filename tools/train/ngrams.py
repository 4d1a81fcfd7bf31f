"""The n-gram hash of a prepared directory or a checkpoint, built by the engine's own code."""

from __future__ import annotations

from pathlib import Path

from engram_io.hashing import NgramHash
from engram_io.token_map import TokenMap
from protocol.config import ModelConfig


def ngram_hash(directory: Path, config: ModelConfig) -> NgramHash | None:
    """None where `config` has no engram layer. Raises CheckpointError."""
    if not config.engram_layer_ids:
        return None
    classes = TokenMap.load(directory, config).classes
    return NgramHash.from_config(config, classes, directory / "config.json")
