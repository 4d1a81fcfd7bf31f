"""Where a layer's experts lie, and whether engram rows are there, asked from inside a graph.

Owns the kernels between a layer's picks and its experts when a whole token is one graph. One tells
the host what was picked and predicted, through registered host memory. The other, only where the
router found no address of a pick, waits for the host's answer, with a bound; a wait that runs out
is the last one of its token. A third waits likewise for the host to have sent the token's engram
rows.

The first two are launched one right after the other. On a device with dependent launches the second
runs while what the first wrote is still on its way to the host's memory, which takes longer than
all else; nowhere does it run before the first.

Every word of the record and of the answer carries the token's tag and layer in its upper half. So
none needs to be written or seen before another, and a half that is old is never taken for new.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compute.kernels.launching import PDL
from compute.kernels.numeric import PORTABLE, release_next, wait_for_previous


@triton.jit
def _post(address, word):
    """Store int64 `word` where the host sees it though this kernel goes on."""
    if PORTABLE:
        tl.store(address, word)
    else:
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.u64 [$1], $2; mov.u32 $0, 0;",
            "=r,l,l",
            [address.to(tl.int64), word],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _lower_half(word):
    return word & 0xFFFFFFFF


@triton.jit
def _tell(
    routed, tag, slots, record, layer, said, PICKS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    wait_for_previous()
    stamp = (tl.load(tag) + layer) << 32
    word = tl.arange(0, WORDS)
    value = tl.load(routed + word, mask=word < said, other=0)
    absent = tl.load(slots + value, mask=word < PICKS, other=0) < 0
    half = _lower_half(value.to(tl.int64)) | (absent.to(tl.int64) << 31)
    _post(record + word, half | stamp)
    # Only now: what follows does not wait for our end, which is when the host has all of it.
    release_next()


@triton.jit
def _ask(
    tag, given_up, first_slot, status, answer, table, layer, looks,
    PICKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    release_next()
    # No wait for `tell`, which releases us once it has read and said all. What we read was written
    # before it began, past this multiprocessor's own cache.
    pick, part = tl.arange(0, PADDED)[:, None], tl.arange(0, 8)[None, :]
    there = (pick < PICKS) & (part < 6)
    address = tl.load(table + pick * 6 + part, mask=there, other=1, cache_modifier=".cg")
    absent = (address == 0).to(tl.int32)
    if tl.max(tl.max(absent, axis=1), axis=0) > 0:
        stamp = (tl.load(tag, cache_modifier=".cg") + layer) << 32
        # After a wait that ran out the rest of the token is for nothing, and waits no more.
        left = tl.where(tl.load(given_up, cache_modifier=".cg") == 0, looks, 0)
        low = tl.full((PADDED, 8), 0, tl.int64)
        high = tl.full((PADDED, 8), 0, tl.int64)
        here = tl.full((), 0, tl.int32)
        at = answer + (pick * 8 + part) * 2
        while (here == 0) & (left > 0):
            low = tl.load(at, mask=pick < PICKS, other=stamp, volatile=True)
            high = tl.load(at + 1, mask=pick < PICKS, other=stamp, volatile=True)
            old = (((low ^ stamp) >> 32) != 0) | (((high ^ stamp) >> 32) != 0)
            here = 1 - tl.max(tl.max(old.to(tl.int32), axis=1), axis=0)
            left -= 1
        found = _lower_half(low) | (high << 32)
        # Behind the addresses of the first pick: whether the host has them all.
        go = tl.sum(tl.sum(tl.where((pick == 0) & (part == 6), found, 0), axis=1), axis=0)
        if (here == 1) & (go == 1):
            address = found
        else:
            somewhere = tl.load(first_slot + part, mask=part < 6, other=0)
            address = tl.where(absent == 1, somewhere, address)
            tl.store(given_up, 1)
            _post(status + tl.arange(0, 1), stamp + tl.full((1,), 1, tl.int64))
        tl.store(table + pick * 6 + part, address, mask=there)


@triton.jit
def _await_rows(tag, given_up, status, rows_here, layer, looks):
    wait_for_previous()
    release_next()
    stamp = (tl.load(tag) + layer) << 32
    left = tl.where(tl.load(given_up) == 0, looks, 0)
    word = stamp ^ (1 << 32)
    while ((word ^ stamp) >> 32 != 0) & (left > 0):
        word = tl.load(rows_here, volatile=True)
        left -= 1
    if word != stamp | 1:
        tl.store(given_up, 1)
        _post(status + tl.arange(0, 1), stamp + tl.full((1,), 1, tl.int64))


def tell(
    routed: torch.Tensor,
    tag: torch.Tensor,
    slots: torch.Tensor,
    record: torch.Tensor,
    *,
    layer: int,
    picks: int,
) -> None:
    """Tell the host what `layer` has routed.

    `routed` int32 [k + 2 p]: k = `picks`, prediction, margins' bits. `tag` int64 [1] of the token.
    `slots` int32 [E]: the layer's experts' slots, below 0 where one has none. To the host: `record`
    int64 [W], W a power of two, words `(tag + layer) << 32 | value`, in a pick's bit 31 whether it
    is absent.
    """
    _tell[(1,)](
        routed, tag, slots, record, layer, len(routed), PICKS=picks, WORDS=len(record),
        num_warps=1, **PDL,
    )  # fmt: skip


def ask(
    tag: torch.Tensor,
    given_up: torch.Tensor,
    first_slot: torch.Tensor,
    status: torch.Tensor,
    answer: torch.Tensor,
    table: torch.Tensor,
    *,
    layer: int,
    looks: int,
) -> None:
    """Wait for the host's addresses of `layer`'s picks where one is absent: zero in `table`.

    To be launched right after `tell`.

    `table` int64 [k, 6]; valid but of other experts after a wait that ran out, from `first_slot`
    int64 [6]. `tag` as `tell` has it. `given_up` int64 [1] becomes 1, and `status` int64 [1] on the
    host `(tag + layer) << 32 | 1`, where the wait ran out after `looks` looks or the host gave up.
    From the host, on the device: `answer` int64 [k, 8, 2], of each pick six addresses, lower and
    upper halves of 32 bits in words of the record's form; 1 in the first pick's seventh place, 0
    where the host gives up.
    """
    picks = len(table)
    _ask[(1,)](
        tag, given_up, first_slot, status, answer, table, layer, looks,
        PICKS=picks, PADDED=triton.next_power_of_2(picks), num_warps=1, **PDL,
    )  # fmt: skip


def await_rows(
    tag: torch.Tensor,
    given_up: torch.Tensor,
    status: torch.Tensor,
    rows_here: torch.Tensor,
    *,
    layer: int,
    looks: int,
) -> None:
    """Wait until the host says that the token's engram rows are on the device.

    From the host, on the device: `rows_here` int64 [1], `(tag + layer) << 32 | 1`, without the 1
    where it gives up. `tag`, `given_up` and `status` as `ask` has them.
    """
    _await_rows[(1,)](tag, given_up, status, rows_here, layer, looks, num_warps=1, **PDL)
