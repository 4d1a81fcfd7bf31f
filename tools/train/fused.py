"""Which functions of the model are compiled: one small graph each, shared by all layers.

Owns the decision alone. Eager kernels would be bound by launches at this size, and one graph of the
whole model takes minutes to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


_eager = False


@contextmanager
def eager() -> Iterator[None]:
    """Inside, nothing is compiled: for parts that run too seldom to be worth a compilation."""
    global _eager
    before, _eager = _eager, True
    try:
        yield
    finally:
        _eager = before


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled in training on a GPU (by its first argument) and as it is elsewhere.

    Evaluation runs other shapes, once: compiling for them would cost more than it saves.
    """
    compiled: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        on_gpu = isinstance(first, torch.Tensor) and first.is_cuda
        if not on_gpu or _eager or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function, dynamic=False))
        return compiled[0](*args, **kwargs)

    return call
