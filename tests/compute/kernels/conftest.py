"""Where the kernels run in these tests: on the GPU if there is one, else in Triton's interpreter.

The choice is made before anything imports triton, which reads it when a kernel is defined.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; runs at released widths")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def exact_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the float64 truth here, and every test draws its own numbers."""
    from compute.kernels import reference

    monkeypatch.setattr(reference, "PRODUCT", torch.float64)
    torch.manual_seed(20261202)
