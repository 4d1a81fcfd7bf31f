"""How the masters move: Muon for matrices, AdamW for everything else.

Owns the split of parameters and the learning rates. Muon takes the momentum's nearest orthogonal
matrix as its step (five Newton-Schulz rounds); matrices of one shape, all experts of all layers, go
in one
batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

MUON_RATE = 0.02
MUON_DECAY = 0.05
MOMENTUM = 0.95
# AdamW rates by the ending of a parameter's name; the first match counts.
ADAM_RATES = (
    ("engram.embed.weight", 5e-3),
    ("embed.weight", 5e-3),
    ("head.weight", 3e-3),
    ("_fn", 3e-4),
    ("gate.weight", 1e-3),
    ("", 2e-3),
)
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """[n, r, c] with singular values near 1 and the singular vectors of `x` [n, r, c]."""
    a, b, c = _COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    # A CPU multiplies bf16 matrices far slower than fp32 ones.
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x.transpose(1, 2) if tall else x
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    """Steps of one size for every matrix; parameters are [..., rows, columns]."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": MUON_RATE})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step over all parameters that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape[-2:]].append(parameter)
            for same in by_shape.values():
                self._step_alike(same, group["lr"])

    def _step_alike(self, parameters: list[torch.Tensor], rate: float) -> None:
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        moments = [self.state[parameter]["momentum"] for parameter in parameters]
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_lerp_(moments, grads, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(grads, moments, MOMENTUM)
        rows, columns = parameters[0].shape[-2:]
        steps = orthogonal(torch.cat([step.reshape(-1, rows, columns) for step in ahead]))
        scale = -rate * max(1.0, rows / columns) ** 0.5
        counts = [parameter.numel() // (rows * columns) for parameter in parameters]
        updates = [
            step.view(parameter.shape).float()
            for step, parameter in zip(steps.split(counts), parameters, strict=True)
        ]
        torch._foreach_mul_(parameters, 1 - rate * MUON_DECAY)
        torch._foreach_add_(parameters, updates, alpha=scale)


def optimizers(*modules: nn.Module) -> list[torch.optim.Optimizer]:
    """Both optimizers over all parameters of `modules`; every group's `lr` is its full rate."""
    matrices: list[nn.Parameter] = []
    groups: dict[float, list[nn.Parameter]] = defaultdict(list)
    for module in modules:
        for name, parameter in module.named_parameters():
            rate = next(rate for ending, rate in ADAM_RATES if name.endswith(ending))
            if (
                parameter.ndim >= 2
                and rate == ADAM_RATES[-1][1]
                and "q_weight" not in name
                and "k_weight" not in name
            ):
                matrices.append(parameter)
            else:
                groups[rate].append(parameter)
    adam = torch.optim.AdamW(
        [{"params": params, "lr": rate} for rate, params in groups.items()],
        betas=(0.9, 0.98),
        eps=1e-10,
        weight_decay=0.0,
        fused=next(iter(groups.values()))[0].is_cuda,
    )
    both: list[torch.optim.Optimizer] = [Muon(matrices), adam]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return both


def schedule(step: int, steps: int | None, warmup: int) -> float:
    """Factor on every rate: up over `warmup` steps, level, then down to 0 over the last 60 %.

    `steps` may be None while less than two fifths are done.
    """
    up = min(1.0, (step + 1) / warmup)
    if steps is None:
        return up
    down = min(1.0, (steps - step) / (0.6 * steps))
    return up * down
