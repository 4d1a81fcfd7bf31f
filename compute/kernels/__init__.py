"""The kernels of a step and those of a chunk of many tokens: Triton on CUDA, torch elsewhere.

Owns the choice, made here and nowhere else. A step's kernels write into tensors they are given,
allocate nothing, read nothing back to the host, and may be captured in a CUDA graph; their torch
references have the same signatures. A chunk's return new tensors, as the torch functions in
`compute.layers` do that they stand in for.
"""

from __future__ import annotations

from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType:
    """The module of kernels for tensors on `device`: `triton_kernels` on CUDA, else `reference`."""
    # Imported here because Triton need not be installed where no GPU is.
    if device.type == "cuda":
        from compute.kernels import triton_kernels

        return triton_kernels
    from compute.kernels import reference

    return reference


def chunk_kernels(device: torch.device) -> ModuleType | None:
    """What stands in for torch operations over many tokens on `device`: `triton_chunk` on CUDA,
    nothing elsewhere."""
    if device.type != "cuda":
        return None
    from compute.kernels import triton_chunk

    return triton_chunk
