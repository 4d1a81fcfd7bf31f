"""What `compute.kernels.ask` does, in torch operations: for a host that plays the device's part."""

from __future__ import annotations

import torch

LOWER = 0xFFFFFFFF


def tell(
    routed: torch.Tensor,
    tag: torch.Tensor,
    slots: torch.Tensor,
    record: torch.Tensor,
    *,
    layer: int,
    picks: int,
) -> None:
    values = torch.zeros(len(record), dtype=torch.int64)
    values[: len(routed)] = routed.long() & LOWER
    values[:picks] |= (slots[routed[:picks].long()] < 0).long() << 31
    record.copy_(values | (int(tag) + layer) << 32)


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
    stamp = (int(tag) + layer) << 32
    absent = table[:, :1] == 0
    if not absent.any():
        return
    words = _answered(answer, stamp, 0 if int(given_up) else looks)
    found = None if words is None else (words[..., 0] & LOWER) | (words[..., 1] << 32)
    if found is not None and int(found[0, 6]) == 1:
        table.copy_(found[:, :6])
    else:
        table.copy_(torch.where(absent, first_slot, table))
        given_up.fill_(1)
        status.fill_(stamp | 1)


def await_rows(
    tag: torch.Tensor,
    given_up: torch.Tensor,
    status: torch.Tensor,
    rows_here: torch.Tensor,
    *,
    layer: int,
    looks: int,
) -> None:
    stamp = (int(tag) + layer) << 32
    for _ in range(0 if int(given_up) else looks):
        word = int(rows_here)
        if (word ^ stamp) >> 32 == 0:
            if word == stamp | 1:
                return
            break
    given_up.fill_(1)
    status.fill_(stamp | 1)


def _answered(answer: torch.Tensor, stamp: int, looks: int) -> torch.Tensor | None:
    """The answer to the record of `stamp`, once every word of it is there."""
    for _ in range(looks):
        words = answer.clone()
        if bool(((words ^ stamp) >> 32 == 0).all()):
            return words
    return None
