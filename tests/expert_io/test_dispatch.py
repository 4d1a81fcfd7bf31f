"""Symptoms: a reader that idles beside waiting orders, a guess where nothing can overtake it, a
wait for compute's progress that nobody looks after."""

from __future__ import annotations

from collections import deque
from typing import cast

import pytest

from expert_io.dispatch import Dispatcher
from expert_io.reads import Order, Read
from expert_io.residency import Residency
from expert_io.slices import Slice
from protocol.messages import PREDICTED, URGENT

PIECE = Slice(0, 0, 4096, 4096, 0, (), 0)


class Pieces:
    """A residency of pieces by lane and nothing else."""

    def __init__(self, *lanes: int) -> None:
        self.lanes = deque(sorted(lanes))
        self.blocked = False

    def next_order(self, reader: int, now: float, *, urgent_only: bool = False) -> Order | None:
        if not self.lanes or (urgent_only and self.lanes[0] != URGENT):
            return None
        read = Read((0, 0), self.lanes.popleft(), deque())
        return Order(0, reader, read, PIECE, now, 1, PIECE.length)


def dispatcher(pieces: Pieces, readers: int = 2) -> Dispatcher:
    made = Dispatcher(cast(Residency, pieces))
    for reader in range(readers):
        made.joined(reader)
    return made


def given(made: Dispatcher) -> list[tuple[int, int]]:
    return [(order.reader, order.read.lane) for order in made.orders(0.0)]


def test_every_reader_has_one_order_before_any_has_two_and_none_has_three() -> None:
    pieces = Pieces(*[URGENT] * 9)
    made = dispatcher(pieces)
    assert given(made) == [(0, URGENT), (1, URGENT), (0, URGENT), (1, URGENT)]
    assert given(made) == []
    made.answered(1)
    assert given(made) == [(1, URGENT)]


def test_what_is_queued_at_a_reader_is_urgent() -> None:
    made = dispatcher(Pieces(URGENT, PREDICTED, PREDICTED))
    assert given(made) == [(0, URGENT), (1, PREDICTED)]
    made.answered(1)
    assert given(made) == [(1, PREDICTED)]


def test_a_reader_that_is_there_again_holds_nothing() -> None:
    pieces = Pieces(*[PREDICTED] * 3)
    made = dispatcher(pieces)
    assert given(made) == [(0, PREDICTED), (1, PREDICTED)]
    made.joined(0)
    assert given(made) == [(0, PREDICTED)]


@pytest.mark.parametrize("blocked", [True, False])
def test_compute_is_looked_at_while_a_read_waits_for_it_and_a_reader_idles(blocked: bool) -> None:
    pieces = Pieces(PREDICTED)
    pieces.blocked = blocked
    made = dispatcher(pieces)
    given(made)
    assert made.must_look == blocked  # the second reader idles
    pieces.lanes.append(PREDICTED)
    given(made)
    assert not made.must_look
