"""What a product of many tokens needs around cuBLAS: the weight in bf16, the input on its grid.

Owns two kernels. An fp8 weight is dequantized for every use, which is exact in bf16: it moves five
bytes a weight where torch's operations move some twenty, and from a few hundred tokens on the
product itself takes longer. Keeping weights in bf16 would take twice their memory from the experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.dense import decoded
from compute.kernels.numeric import as_bf16, power_of_two, round_trip_e4m3

#: A program's part of a weight: a block of 32 rows, which share their scales.
ROWS, COLUMNS = 32, 128
#: Groups of 32 values that one program rounds.
GROUPS = 64


@triton.jit
def _dequantize(codes, scales, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(0) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    value = decoded(tl.load(codes + at, mask=mask, other=0))
    groups = tl.cdiv(columns, 32)
    scale = power_of_two(
        tl.load(scales + tl.program_id(1) * groups + group, mask=group < groups, other=0)
    )
    value = tl.reshape(value, (ROWS, COLUMNS // 32, 32)) * scale[None, :, None]
    tl.store(out + at, as_bf16(tl.reshape(value, (ROWS, COLUMNS))), mask=mask)


@triton.jit
def _round_trip(x, out, count, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None].to(tl.int64) * 32 + tl.arange(0, 32)[None, :]
    mask = (group < count)[:, None]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, as_bf16(round_trip_e4m3(value)), mask=mask)


def dequantize_fp8_weight(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 [N, K], exact: as `compute.formats.dequantize_fp8_weight`."""
    rows, columns = codes.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=codes.device)
    _dequantize[(triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))](
        codes, scales, out, rows, columns,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def round_trip_fp8(x: torch.Tensor) -> torch.Tensor:
    """bf16 `x` [..., K] as `compute.formats.round_trip_fp8` gives it."""
    x = x.contiguous()
    out = torch.empty_like(x)
    count = x.numel() // 32
    _round_trip[(triton.cdiv(count, GROUPS),)](x, out, count, GROUPS=GROUPS, num_warps=4)
    return out
