"""Symptoms: a reader that an order ends, or that writes where no order may."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from expert_io.reader import Reader
from expert_io.slices import BLOCK
from protocol.early_copies import EarlySender
from protocol.layouts import Arena, EarlyOrders
from protocol.messages import (
    ReadDone,
    ReaderHello,
    ReadFailed,
    ReadOrder,
    ReadStopped,
    Ready,
    ReviseOrder,
    Stop,
)
from protocol.specs import ReaderSpec, reader_name
from protocol.transport import Channel
from protocol.wire import Message

WAIT_S = 10.0
NAME = reader_name(0)
CONTENT = (bytes(range(200)) * BLOCK)[: 2 * BLOCK - 1] + b"\xff"
GOOD = ReadOrder(
    order=1, file=0, offset=0, length=2 * BLOCK, needed=2 * BLOCK, step=2 * BLOCK,
    arena_offset=0,
    scales=[16, 32], slot=0, piece=0, generation=7, lane=0, layer=0, expert=0,
)  # fmt: skip


class Reading:
    """A reader in a thread over an arena of two slots, and both ends it talks to."""

    def __init__(self, directory: Path) -> None:
        path = directory / "shard"
        path.write_bytes(CONTENT)
        self.arena = Arena.create(slots=2, slot_bytes=2 * BLOCK, pieces=1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ends = [f"ipc://{directory}/{name}" for name in ("control", "orders")]
        self._control = Channel.bind(self._context, ends[0], [Ready])
        says = [ReaderHello, ReadDone, ReadFailed, ReadStopped]
        self._orders = Channel.bind(self._context, ends[1], says)
        self.early_orders = EarlyOrders.create(readers=1)
        shared = os.dup(self.arena.fd), os.dup(self.early_orders.fd)
        spec = ReaderSpec(0, 0, 1, *ends, [str(path)], *shared, False, 0, 0, 0, "", "")
        self._theirs = (
            Channel.connect(self._context, ends[0], NAME, [Stop]),
            Channel.connect(self._context, ends[1], NAME, [ReadOrder, ReviseOrder]),
        )
        self._reader = Reader(spec, *self._theirs)
        self._thread = threading.Thread(target=self._reader.run)
        self._thread.start()
        assert isinstance(self._said(self._orders), ReaderHello)

    def revise(self, order: int, stop: bool) -> None:
        """Said before the order itself, so that it is known after the first step."""
        assert self._orders.send(ReviseOrder(order, stop), to=NAME)

    def show(self, order: ReadOrder, incarnation: int = 0) -> None:
        """Where it stands before its message has come."""
        EarlySender(self.early_orders.of_reader[0]).put(order.encode(), incarnation)

    def send(self, order: ReadOrder) -> None:
        assert self._orders.send(order, to=NAME)

    def said(self) -> Message:
        return self._said(self._orders)

    def answer(self, order: ReadOrder) -> Message:
        self.send(order)
        return self.said()

    def close(self) -> None:
        self._control.send(Stop(), to=NAME)
        self._thread.join(WAIT_S)
        alive = self._thread.is_alive()
        for channel in (self._control, self._orders, *self._theirs):
            channel.close()
        self._context.destroy(linger=0)
        self.arena.close()
        self.early_orders.close()
        assert not alive

    def _said(self, channel: Channel) -> Message:
        received = channel.receive(WAIT_S)
        assert received is not None, "the reader says nothing"
        return received[1]


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[Reading]:
    reading = Reading(tmp_path)
    yield reading
    reading.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"arena_offset": -BLOCK},
        {"arena_offset": 1 << 40},
        {"length": 0},
        {"step": 0},
        {"step": -BLOCK},
        {"length": -BLOCK},
        {"length": 1 << 62},
        {"needed": 2 * BLOCK + 1},
        {"needed": -1},
        {"file": 1},
        {"file": -1},
        {"offset": -BLOCK},
        {"offset": (1 << 63) - BLOCK},
        {"slot": 2},
        {"slot": -1},
        {"piece": 1},
        {"piece": -1},
        {"scales": [16]},
        {"scales": [16, 2 * BLOCK + 1]},
        {"scales": [-16, 16]},
    ],
    ids=str,
)
def test_a_senseless_order_is_answered_and_ends_no_reader(
    reading: Reading, changes: dict[str, Any]
) -> None:
    answer = reading.answer(replace(GOOD, order=5, **changes))
    assert isinstance(answer, ReadFailed) and answer.order == 5
    assert not reading.arena.landed.any()
    done = reading.answer(GOOD)
    assert isinstance(done, ReadDone) and done.order == 1
    assert reading.arena.data[0].tobytes() == CONTENT and not reading.arena.data[1].any()
    assert reading.arena.landed.tolist() == [[7], [0]]


def test_a_scale_that_is_no_number_fails_the_read_with_its_place(reading: Reading) -> None:
    last = replace(GOOD, offset=BLOCK, length=BLOCK, needed=BLOCK, arena_offset=2 * BLOCK, slot=1)
    begin = 3 * BLOCK - 16
    answer = reading.answer(replace(last, scales=[2 * BLOCK, 2 * BLOCK + 8, begin, 3 * BLOCK]))
    assert isinstance(answer, ReadFailed)
    assert f"in the 16 bytes at offset {2 * BLOCK - 16} is not a number" in answer.reason
    assert not reading.arena.landed.any()
    assert isinstance(reading.answer(replace(last, scales=[begin, 3 * BLOCK - 1])), ReadDone)


STEPS = replace(GOOD, step=BLOCK)


def test_a_read_that_nobody_wants_ends_with_its_step(reading: Reading) -> None:
    reading.revise(1, stop=True)
    answer = reading.answer(STEPS)
    assert isinstance(answer, ReadStopped) and (answer.order, answer.nbytes) == (1, BLOCK)
    assert reading.arena.data[0].tobytes() == CONTENT[:BLOCK] + bytes(BLOCK)
    assert not reading.arena.landed.any()
    done = reading.answer(replace(GOOD, order=2))
    assert isinstance(done, ReadDone) and reading.arena.data[0].tobytes() == CONTENT


@pytest.mark.parametrize(("order", "stop"), [(1, False), (2, True)])
def test_a_read_in_steps_is_whole_unless_it_is_told_to_stop(
    reading: Reading, order: int, stop: bool
) -> None:
    reading.revise(order, stop)
    assert isinstance(reading.answer(STEPS), ReadDone)
    assert reading.arena.data[0].tobytes() == CONTENT
    assert reading.arena.landed.tolist() == [[7], [0]]


def test_a_scale_that_is_no_number_is_found_whatever_step_it_came_in(reading: Reading) -> None:
    last = 2 * BLOCK - 16
    answer = reading.answer(replace(STEPS, scales=[16, 32, last, 2 * BLOCK]))
    assert isinstance(answer, ReadFailed) and f"16 bytes at offset {last}" in answer.reason


def test_an_order_seen_before_its_message_is_executed_once(reading: Reading) -> None:
    reading.show(GOOD)
    reading.revise(999, stop=False)  # of no order: it wakes the reader
    done = reading.said()
    assert isinstance(done, ReadDone) and done.order == GOOD.order
    reading.send(GOOD)
    after = reading.answer(replace(GOOD, order=2, generation=8))
    assert isinstance(after, ReadDone) and after.order == 2


def test_an_order_that_its_predecessor_was_shown_is_not_executed(reading: Reading) -> None:
    reading.show(GOOD, incarnation=1)
    done = reading.answer(replace(GOOD, order=2, slot=1, arena_offset=2 * BLOCK, scales=[]))
    assert isinstance(done, ReadDone) and done.order == 2
    assert reading.arena.landed.tolist() == [[0], [7]]
