"""Masters to and from a checkpoint in the released layout.

Owns the mapping between parameters and stored tensors, in both directions; names and formats come
from `protocol.tensor_table`, so a checkpoint written here is one the engine accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from compute import formats
from protocol.config import ModelConfig
from protocol.shards import Shards
from protocol.tensor_table import expected_tensors
from tools.train import rounding

Stored = dict[str, torch.Tensor]


def masters(*modules: nn.Module) -> dict[str, torch.Tensor]:
    """fp32 master of every stored weight by checkpoint name; an expert's is a view of its
    layer's."""
    found: dict[str, torch.Tensor] = {}
    for module in modules:
        state: dict[str, torch.Tensor] = dict(module.named_parameters())
        state.update((n, b) for n, b in module.named_buffers() if n.endswith("gate.bias"))
        for name, tensor in state.items():
            found.update(_checkpoint_names(name, tensor.detach()))
    return found


def load_masters(directory: Path, config: ModelConfig, *modules: nn.Module) -> None:
    """Set every master to what the checkpoint in `directory` stores; raises CheckpointError."""
    shards = Shards.open(directory, config)
    for name, master in masters(*modules).items():
        stored = stored_tensor(shards, name)
        scale_name = f"{name.removesuffix('.weight')}.scale"
        if scale_name in shards.tensors:
            stored = _decode(stored, stored_tensor(shards, scale_name), name)
        master.copy_(stored)


def stored_tensor(shards: Shards, name: str) -> torch.Tensor:
    """A tensor as it lies on disk."""
    with safe_open(shards.tensors[name].path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def store(config: ModelConfig, *modules: nn.Module) -> Stored:
    """Every tensor of the checkpoint in its stored format, in the order of the tensor table."""
    weights = {name: tensor.cpu() for name, tensor in masters(*modules).items()}
    out: Stored = {}
    for name, spec in expected_tensors(config).items():
        if name.endswith(".gate.bias_vl"):
            out[name] = weights[name.removesuffix("_vl")].clone()
        elif name.endswith(".scale") and name not in weights:
            continue
        else:
            out.update(_encode(name, weights[name], spec.dtype))
    return {name: out[name] for name in expected_tensors(config)}


def _checkpoint_names(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    base, _, matrix = name.rpartition(".")
    if not base.endswith("ffn.experts"):
        yield name, tensor
        return
    for expert, weight in enumerate(tensor):
        yield f"{base}.{expert}.{matrix}.weight", weight


def _decode(stored: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    codes, scales = stored.view(torch.uint8), scale.view(torch.uint8)
    if stored.dtype == torch.int8:
        return formats.dequantize_fp4_weight(codes, scales)
    if name.endswith("engram.embed.weight"):
        return formats.dequantize_engram_rows(codes, scales)
    return formats.dequantize_fp8_weight(codes, scales)


def _encode(name: str, master: torch.Tensor, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    scale_name = f"{name.removesuffix('.weight')}.scale"
    if dtype == "F32":
        yield name, master.float().contiguous()
    elif dtype == "BF16":
        yield name, rounding.stored_bf16(master).contiguous()
    elif dtype == "I8":
        codes, scale = rounding.fp4_codes(master)
        yield name, codes.view(torch.int8)
        yield scale_name, _e8m0(scale)
    else:
        by_row = name.endswith("engram.embed.weight")
        codes, scale = (rounding.fp8_groups if by_row else rounding.fp8_tiles)(master)
        yield name, codes
        yield scale_name, _e8m0(scale)


def _e8m0(scale: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two as e8m0 bytes."""
    exponent = scale.contiguous().view(torch.int32) >> 23
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
