"""Early copies in one process: a message is taken once, whole, and by the one it was meant for."""

from __future__ import annotations

import random
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from protocol.early_copies import EarlyReceiver, EarlySender
from protocol.errors import HeadraceError
from protocol.layouts import CELL_BYTES, CELLS, Cells, EarlyOrders, Progress
from protocol.messages import Demand

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cells() -> Cells:
    return Progress.create(words_count=Progress.COUNT).demands


def receiver(cells: Cells, incarnation: int = 0) -> EarlyReceiver[Demand]:
    return EarlyReceiver(cells, Demand, attrgetter("demand"), incarnation)


def demand(number: int) -> Demand:
    return Demand(number, number % 7, list(range(number % 5)))


def test_a_message_is_taken_once_whichever_way_it_comes_first(cells: Cells) -> None:
    sender, taker = EarlySender(cells), receiver(cells)
    sender.put(demand(1).encode())
    assert taker.look() == [demand(1)]
    assert taker.look() == []
    assert taker.has_had(demand(1))
    sender.put(demand(2).encode())
    assert not taker.has_had(demand(2))
    assert taker.look() == []


def test_a_message_that_is_sent_again_is_heard_again(cells: Cells) -> None:
    sender, taker = EarlySender(cells), receiver(cells)
    sender.put(demand(1).encode())
    assert taker.look() == [demand(1)]
    assert [taker.has_had(demand(1)) for _ in range(3)] == [True, False, False]


def test_several_are_taken_in_order_and_what_was_overwritten_comes_the_other_way(
    cells: Cells,
) -> None:
    sender, taker = EarlySender(cells), receiver(cells)
    for number in range(1, CELLS + 3):
        sender.put(demand(number).encode())
    assert taker.look() == [demand(number) for number in range(3, CELLS + 3)]
    assert [taker.has_had(demand(n)) for n in range(1, CELLS + 3)] == [False] * 2 + [True] * CELLS


def test_what_is_meant_for_a_predecessor_is_left_alone(cells: Cells) -> None:
    sender, successor = EarlySender(cells), receiver(cells, incarnation=1)
    sender.put(demand(1).encode(), incarnation=0)
    assert successor.look() == []
    sender.put(demand(2).encode(), incarnation=1)
    assert successor.look() == [demand(2)]


def test_a_message_that_is_being_overwritten_comes_the_other_way(cells: Cells) -> None:
    sender, taker = EarlySender(cells), receiver(cells)
    sender.put(demand(1).encode())
    sender.put(demand(2).encode())
    cells.heads[0, 0] += 1
    assert taker.look() == [demand(2)]
    assert [taker.has_had(demand(n)) for n in (1, 2)] == [False, True]


def test_a_long_message_is_left_to_the_socket(cells: Cells) -> None:
    long = Demand(1, 0, [1 << 40] * CELL_BYTES)
    sender, taker = EarlySender(cells), receiver(cells)
    sender.put(long.encode())
    assert taker.look() == [] and not taker.has_had(long)


@pytest.mark.parametrize("length", [0, 1, 300, CELL_BYTES, CELL_BYTES + 1, 1 << 40, -1])
def test_what_is_no_message_is_counted_and_passed_over(cells: Cells, length: int) -> None:
    sender, taker = EarlySender(cells), receiver(cells)
    sender.put(demand(1).encode())
    cells.frames[0] = np.random.default_rng(length & 0xFF).integers(0, 256, CELL_BYTES)
    cells.heads[0, 2] = length
    assert taker.look() == [] and taker.malformed == 1
    assert taker.look() == [] and taker.malformed == 1
    sender.put(demand(2).encode())
    assert taker.look() == [demand(2)] and taker.malformed == 1


def test_each_is_taken_once_whatever_the_turns(cells: Cells) -> None:
    for seed in range(20):
        chance, sender, taker = random.Random(seed), EarlySender(cells), receiver(cells)
        taken: list[int] = []
        taker.look()
        sent: list[Demand] = []
        number = 1000 * (seed + 1)
        for _ in range(300):
            turn = chance.random()
            if turn < 0.4:
                number += chance.randint(1, 3)
                sent.append(demand(number))
                sender.put(sent[-1].encode())
            elif turn < 0.7:
                taken += [message.demand for message in taker.look()]
            elif sent:
                message = sent.pop(0)
                if not taker.has_had(message):
                    taken.append(message.demand)
        taken += [message.demand for message in sent if not taker.has_had(message)]
        assert len(taken) == len(set(taken)) and number in taken
        assert len(taken) > 80


WRITER = """
import sys
from protocol.early_copies import EarlySender
from protocol.layouts import EarlyOrders
from protocol.messages import Demand
sender = EarlySender(EarlyOrders.attach(int(sys.argv[1])).of_reader[0])
for number in range(int(sys.argv[2])):
    sender.put(Demand(number, number, [number] * (number % 40)).encode())
"""


def test_another_process_sees_whole_messages_in_order() -> None:
    region, count = EarlyOrders.create(readers=1), 20_000
    taker = receiver(region.of_reader[0])
    command = [sys.executable, "-c", WRITER, str(region.fd), str(count)]
    with subprocess.Popen(command, pass_fds=(region.fd,), cwd=ROOT) as writer:
        seen: list[int] = []
        while not seen or seen[-1] != count - 1:
            ended = writer.poll()
            for message in taker.look():
                number = message.demand
                assert message == Demand(number, number, [number] * (number % 40))
                seen.append(number)
            assert not ended, "the writer failed"
            assert ended is None or seen[-1] == count - 1
    assert seen == sorted(set(seen)) and taker.malformed == 0


def test_cells_of_another_layout_are_refused() -> None:
    region = EarlyOrders.create(readers=2)
    with pytest.raises(HeadraceError, match="shared memory of Progress"):
        Progress.attach(region.fd)
    assert len(EarlyOrders.attach(region.fd).of_reader) == 2
