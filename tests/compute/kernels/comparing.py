"""Runs a kernel and its reference on the same fresh tensors, and says how far apart they may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compute.kernels.attention import AttentionScratch
from compute.kernels.limbs import Limbs
from compute.kernels.router import Lookup, Prediction

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUP = 32


def fp8_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every e4m3 code but NaN, subnormals included, under scales spread over 2^-13..2^-5."""
    codes = torch.randint(0, 255, (rows, columns), dtype=torch.uint8)
    codes[codes == 0x7F] = 0x03
    scales = (-(-rows // GROUP), -(-columns // GROUP))
    return codes, torch.randint(114, 122, scales, dtype=torch.uint8)


def fp4_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    return packed, torch.randint(116, 124, (rows, columns // GROUP), dtype=torch.uint8)


def expert_table(
    experts: int, hidden: int, intermediate: int, picks: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, list[Any], torch.Tensor]:
    """(address table on `device`, what keeps its bytes alive, the same table over CPU copies)."""
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    on_cpu = [[t for s in shapes for t in fp4_weight(*s)] for _ in range(experts)]
    there = [[t.to(device) for t in expert] for expert in on_cpu]
    chosen = picks.flatten().tolist()

    def table(of: list[list[torch.Tensor]]) -> torch.Tensor:
        return torch.tensor([[t.data_ptr() for t in of[e]] for e in chosen])

    return table(there).to(device), [on_cpu, there], table(on_cpu)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A CPU tensor of NaN (or -1): an element no kernel writes shows."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)


def empty_limbs(vectors: int, columns: int) -> Limbs:
    """On the CPU, poisoned: sums that no limbs have and NaN scales."""
    limbs = Limbs.empty(vectors, columns, torch.device("cpu"))
    limbs.bytes.fill_(77)
    limbs.sums.fill_(-1)
    limbs.scales.fill_(float("nan"))
    return limbs


def _moved(argument: Any, device: torch.device) -> Any:
    """A copy of a tensor, or of each tensor of a tuple of them, on `device`."""
    if isinstance(argument, int):
        return argument
    if isinstance(argument, (Limbs, AttentionScratch, Prediction, Lookup)):
        return type(argument)(*(_moved(part, device) for part in argument))
    return None if argument is None else argument.to(device).clone()


def run_both(
    kernel: Callable[..., None],
    reference: Callable[..., None],
    *arguments: Any,
    reference_arguments: dict[int, torch.Tensor] | None = None,
    options: dict[str, Any] | None = None,
    **common: Any,
) -> tuple[list[Any], list[Any]]:
    """The CPU `arguments` after `kernel` ran on copies of them on DEVICE, and after `reference`
    did.

    `reference_arguments` replaces arguments by position for the reference (address tables),
    `options` go to the kernel only (tile shapes).
    """
    got = [_moved(argument, DEVICE) for argument in arguments]
    kernel(*got, **common, **(options or {}))
    want = [_moved(argument, torch.device("cpu")) for argument in arguments]
    for position, argument in (reference_arguments or {}).items():
        want[position] = argument
    reference(*want, **common)
    return [_moved(argument, torch.device("cpu")) for argument in got], want


def assert_close(got: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    """||got - want|| <= relative * ||want||, and no NaN where there should be none."""
    assert not got.isnan().any(), "an element was not written"
    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300)
    assert error <= relative, f"rel {error:.2e}, allowed {relative:.2e}"


def assert_same_bf16(
    got: torch.Tensor,
    want: torch.Tensor,
    differing: float = 1e-3,
    size: torch.Tensor | None = None,
) -> None:
    """All but a fraction `differing` of elements equal, those within about one bf16 step (of
    `size`, where that is what was rounded)."""
    assert not got.isnan().any(), "an element was not written"
    unequal = got != want
    # One element may always sit on a rounding boundary, however few there are.
    allowed = max(1, int(differing * got.numel()))
    assert unequal.sum() <= allowed, f"{unequal.sum()} of {got.numel()} differ, allowed {allowed}"
    size = want if size is None else size
    step = size.double().abs() * 2.0**-7 + want.double().abs().mean() * 2.0**-9
    assert ((got.double() - want.double()).abs() <= step).all(), "more than one bf16 step apart"


def assert_same_grid(got: torch.Tensor, want: torch.Tensor, differing: float = 2e-3) -> None:
    """As `assert_same_bf16` on the fp8 grid, whose step is an eighth of a value."""
    assert not got.isnan().any(), "an element was not written"
    unequal = got != want
    allowed = max(1, int(differing * got.numel()))
    assert unequal.sum() <= allowed, f"{unequal.sum()} of {got.numel()} differ, allowed {allowed}"
    assert_close(got, want, 2e-2)
