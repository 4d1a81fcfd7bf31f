"""The kernels of a step: Triton on CUDA, plain torch elsewhere, with one signature a kernel.

Owns the choice, made here and nowhere else. Every kernel writes into tensors it is given, allocates
nothing, reads nothing back to the host, and may be captured in a CUDA graph.
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
