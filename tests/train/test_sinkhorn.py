"""The mixes' normalisation: right forward and backward, in torch and in the GPU's kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tools.train import sinkhorn

ROOT = Path(__file__).parents[2]
IN_KERNELS = """
import torch
from tools.train import sinkhorn, sinkhorn_kernels as kernels
generator = torch.Generator().manual_seed(3)
cells = torch.softmax(torch.randn(10, 4, 4, generator=generator), -1) + 1e-6
grad = torch.randn(10, 4, 4, generator=generator)
result, out = torch.full_like(cells, 9.0), torch.full_like(cells, 9.0)
kernels.forward_kernel[(2,)](cells, result, 10, 6, 1e-6, 4, 8)
kernels.backward_kernel[(2,)](cells, result, grad, out, 10, 6, 4, 8)
torch.testing.assert_close(result, sinkhorn.forward(cells, 6, 1e-6), rtol=1e-5, atol=1e-6)
torch.testing.assert_close(out, sinkhorn.backward(cells, result, grad, 6), rtol=1e-4, atol=1e-6)
"""


def test_gradient_is_that_of_all_rounds() -> None:
    generator = torch.Generator().manual_seed(4)
    cells = torch.softmax(torch.randn(50, 4, 4, generator=generator), -1) + 1e-6
    grad = torch.randn(50, 4, 4, generator=generator)
    exact = cells.double().requires_grad_()
    (sinkhorn.forward(exact, 20, 1e-6) * grad).sum().backward()
    found = cells.clone().requires_grad_()
    (sinkhorn.sinkhorn(found, 20, 1e-6) * grad).sum().backward()
    assert exact.grad is not None and found.grad is not None
    assert (found.grad - exact.grad).norm() < 5e-3 * exact.grad.norm()


def test_kernels_compute_what_torch_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", IN_KERNELS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
