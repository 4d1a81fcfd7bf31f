"""How kernels are launched: as dependents of the one before, and over which grid.

Owns the one switch of dependent launches. They hide a kernel's launch and first weight loads behind
the end of the kernel before it (compute capability 9 and later); what a kernel sees does not
change.
"""

from __future__ import annotations

from typing import Any

import torch

from compute.kernels.numeric import PORTABLE


def dependent_launch_supported() -> bool:
    """Whether the current device can start a kernel before the one before it has ended."""
    return (
        not PORTABLE.value
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (9, 0)
    )


#: Keyword arguments every launch gets.
PDL: dict[str, Any] = {"launch_pdl": True} if dependent_launch_supported() else {}


def set_dependent_launches(on: bool) -> None:
    """Turn dependent launches on, where the device supports them, or off."""
    PDL.clear()
    if on and dependent_launch_supported():
        PDL["launch_pdl"] = True
