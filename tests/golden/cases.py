"""The golden data that lies beside this file: units, prompts through the mini checkpoint."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

# `HEADRACE_TEST_DEVICE=cuda` holds a GPU to the same tensors.
DEVICE = torch.device(os.environ.get("HEADRACE_TEST_DEVICE", "cpu"))
DATA = Path(__file__).parent / "data"
MINI = DATA / "mini"
CASE_NAMES = tuple(sorted(path.stem for path in (DATA / "mini_cases").glob("*.safetensors")))


@cache
def unit(name: str) -> dict[str, torch.Tensor]:
    """Tensors of one kernel's golden file."""
    return load_file(DATA / "units" / f"{name}.safetensors", str(DEVICE))


@cache
def case(name: str) -> dict[str, torch.Tensor]:
    """Tensors of one prompt's golden file; see data/README.md for their meaning."""
    return load_file(DATA / "mini_cases" / f"{name}.safetensors", str(DEVICE))
