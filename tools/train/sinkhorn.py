"""The Sinkhorn normalisation of the stream mixes, with a gradient.

Owns it in torch for a CPU and as two small kernels for a GPU: as tensor operations its forty tiny
reductions cost a launch each, and a compiler that tries to make one kernel of them takes minutes.

With M the result for cells E, dM = M * (dlog E - a_i - b_j), where a and b keep the sums of rows
and columns. The gradient of log E is therefore M * (G - a_i - b_j) with a and b such that its rows
and
columns sum to 0; they are found as the forward pass finds its factors, by turns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

TOKENS_A_PROGRAM = 64


def forward(cells: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """fp32 `cells` [T, hc, hc], columns and rows normalised by turns: columns `rounds` times, rows
    once less. Keeps a factor for each row and column instead of the matrix."""
    rows = torch.ones_like(cells[..., 0])
    columns = 1 / (cells.sum(-2) + eps)
    for _ in range(rounds - 1):
        rows = rows / ((cells * columns.unsqueeze(-2)).sum(-1) * rows + eps)
        columns = columns / ((cells * rows.unsqueeze(-1)).sum(-2) * columns + eps)
    return cells * rows.unsqueeze(-1) * columns.unsqueeze(-2)


def backward(
    cells: torch.Tensor, result: torch.Tensor, grad: torch.Tensor, rounds: int
) -> torch.Tensor:
    """Gradient of the cells, given the result and its gradient; all [T, hc, hc] fp32."""
    a = torch.zeros_like(cells[..., 0])
    b = torch.zeros_like(a)
    for _ in range(rounds):
        a = (result * (grad - b.unsqueeze(-2))).sum(-1)
        b = (result * (grad - a.unsqueeze(-1))).sum(-2)
    return result * (grad - a.unsqueeze(-1) - b.unsqueeze(-2)) / cells


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cells: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
        if cells.is_cuda:
            result = torch.empty_like(cells)
            _kernels()[0][_grid(cells)](cells, result, len(cells), rounds, eps, cells.shape[-1],
                                        TOKENS_A_PROGRAM)  # fmt: skip
        else:
            result = forward(cells, rounds, eps)
        ctx.save_for_backward(cells, result)
        ctx.rounds = rounds
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cells, result = ctx.saved_tensors
        grad = grads[0].contiguous()
        if not cells.is_cuda:
            return backward(cells, result, grad, ctx.rounds), None, None
        out = torch.empty_like(cells)
        _kernels()[1][_grid(cells)](cells, result, grad, out, len(cells), ctx.rounds,
                                    cells.shape[-1], TOKENS_A_PROGRAM)  # fmt: skip
        return out, None, None


def sinkhorn(cells: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """`forward` with a gradient; `cells` fp32 [T, hc, hc], all above 0."""
    out: torch.Tensor = _Sinkhorn.apply(cells.contiguous(), rounds, eps)  # type: ignore[no-untyped-call]
    return out


def _grid(cells: torch.Tensor) -> tuple[int]:
    return (-(-len(cells) // TOKENS_A_PROGRAM),)


@cache
def _kernels() -> tuple[Any, Any]:
    """Imported where a GPU is: machines without one need no Triton."""
    from tools.train import sinkhorn_kernels

    return sinkhorn_kernels.forward_kernel, sinkhorn_kernels.backward_kernel
