"""`tools.train.sinkhorn` in Triton: one program does all rounds of a block of tokens in
registers."""

import triton
import triton.language as tl


@triton.jit
def _places(tokens, HC: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, HC)
    column = tl.arange(0, HC)
    places = token[:, None, None] * (HC * HC) + row[None, :, None] * HC + column[None, None, :]
    return places, (token < tokens)[:, None, None]


@triton.jit
def forward_kernel(cells, result, tokens, rounds, eps, HC: tl.constexpr, BLOCK: tl.constexpr):
    places, inside = _places(tokens, HC, BLOCK)
    e = tl.load(cells + places, mask=inside, other=1.0)
    columns = 1.0 / (tl.sum(e, 1) + eps)
    rows = tl.full((BLOCK, HC), 1.0, tl.float32)
    for _ in range(rounds - 1):
        rows = rows / (tl.sum(e * columns[:, None, :], 2) * rows + eps)
        columns = columns / (tl.sum(e * rows[:, :, None], 1) * columns + eps)
    tl.store(result + places, e * rows[:, :, None] * columns[:, None, :], mask=inside)


@triton.jit
def backward_kernel(
    cells, result, grad, out, tokens, rounds, HC: tl.constexpr, BLOCK: tl.constexpr
):
    places, inside = _places(tokens, HC, BLOCK)
    e = tl.load(cells + places, mask=inside, other=1.0)
    m = tl.load(result + places, mask=inside, other=0.0)
    g = tl.load(grad + places, mask=inside, other=0.0)
    a = tl.full((BLOCK, HC), 0.0, tl.float32)
    b = tl.full((BLOCK, HC), 0.0, tl.float32)
    for _ in range(rounds):
        a = tl.sum(m * (g - b[:, None, :]), 2)
        b = tl.sum(m * (g - a[:, :, None]), 1)
    tl.store(out + places, m * (g - a[:, :, None] - b[:, None, :]) / e, mask=inside)
