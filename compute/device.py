"""The device that the arithmetic runs on, as a user names it."""

from __future__ import annotations

import torch

from protocol.errors import UsageError


def open_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` (`cuda:N`), tried out; raises UsageError where it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"device {name!r} cannot be used, expected cpu or cuda")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {name!r} cannot be used ({reason}); try --device cpu") from None
    return device
