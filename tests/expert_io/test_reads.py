"""Symptoms: an urgent read behind a guess, a piece read twice or never, a late answer believed."""

from __future__ import annotations

from collections import deque

from expert_io.policy import Key
from expert_io.reads import Read, ReadQueue
from expert_io.slices import BLOCK, Slice
from protocol.messages import BACKGROUND, PREDICTED, URGENT


def read(key: Key, lane: int, pieces: int = 3) -> Read:
    slices = (Slice(0, n * BLOCK, BLOCK, BLOCK, 0, (), n) for n in range(pieces))
    return Read(key, lane, deque(slices))


def queued(*reads: Read, begin: bool = True) -> ReadQueue:
    queue = ReadQueue()
    for number, one in enumerate(reads):
        queue.add(one)
        if begin:
            queue.begin(one, number, 1)
    return queue


def offsets(one: Read) -> list[int]:
    return [piece.offset // BLOCK for piece in one.todo]


def test_a_lane_goes_on_with_what_it_began_before_it_begins_another() -> None:
    first, second = read((0, 1), URGENT), read((0, 2), URGENT)
    queue = queued(first, second, begin=False)
    assert queue.next_begun(URGENT) is None and queue.next_waiting(URGENT) is first
    queue.begin(first, 5, 9)
    assert (first.slot, first.generation, first.origin) == (5, 9, URGENT)
    assert queue.next_begun(URGENT) is first and queue.next_waiting(URGENT) is second
    for _ in range(3):
        queue.give_out(first, 0, 0.0, BLOCK)
    assert queue.next_begun(URGENT) is None, "no piece of it is left to give out"
    assert queue.depth == 1


def test_pieces_go_out_once_each_and_in_order() -> None:
    one = read((0, 1), URGENT)
    queue = queued(one)
    orders = [queue.give_out(one, reader, 0.0, BLOCK) for reader in range(3)]
    assert [order.piece.offset // BLOCK for order in orders] == [0, 1, 2]
    assert len({order.number for order in orders}) == 3
    assert not one.over and one.held == 3
    for order in orders:
        assert queue.take_back(order.number, order.reader) is order
    assert one.over


def test_an_answer_counts_once_and_only_from_who_holds_the_order() -> None:
    one = read((0, 1), URGENT)
    queue = queued(one)
    order = queue.give_out(one, 2, 0.0, BLOCK)
    assert queue.take_back(order.number, 1) is None
    assert queue.take_back(order.number + 1, 2) is None
    assert queue.take_back(order.number, 2) is order
    assert queue.take_back(order.number, 2) is None
    assert one.held == 0


def test_a_promoted_prediction_keeps_its_slot_and_frees_its_place_among_predictions() -> None:
    begun, waiting = read((1, 1), PREDICTED), read((1, 2), PREDICTED)
    queue = queued(begun)
    queue.add(waiting)
    assert queue.predictions_begun == 1
    queue.promote(begun)
    queue.promote(waiting)
    assert queue.predictions_begun == 0 and queue.predictions() == []
    assert queue.next_begun(URGENT) is begun and queue.next_waiting(URGENT) is waiting
    assert begun.origin == PREDICTED, "it was begun as a guess"
    queue.begin(waiting, 7, 1)
    assert waiting.origin == URGENT, "it was not"


def test_what_is_urgent_already_keeps_its_place_when_it_is_promoted() -> None:
    first, second = read((0, 1), URGENT), read((0, 2), URGENT)
    queue = queued(first, second)
    queue.promote(first)
    assert queue.next_begun(URGENT) is first


def test_a_prediction_promoted_with_all_pieces_out_is_not_queued_again() -> None:
    one = read((1, 1), PREDICTED, pieces=1)
    queue = queued(one)
    order = queue.give_out(one, 0, 0.0, BLOCK)
    queue.promote(one)
    assert queue.next_begun(URGENT) is None and queue.predictions_begun == 0
    queue.reader_lost(0)
    assert queue.next_begun(URGENT) is one and offsets(one) == [0], "now it is urgent"
    assert queue.take_back(order.number, 0) is None


def test_a_dead_readers_pieces_come_first_in_their_lane() -> None:
    one, other = read((0, 1), URGENT), read((0, 2), URGENT)
    queue = queued(other, one)
    queue.give_out(one, 0, 0.0, BLOCK)
    queue.give_out(other, 1, 0.0, BLOCK)
    assert queue.reader_lost(0) == [one]
    assert queue.next_begun(URGENT) is one and offsets(one) == [0, 1, 2]
    assert one.held == 0 and other.held == 1


def test_what_was_given_up_is_over_once_readers_have_answered() -> None:
    one = read((0, 1), BACKGROUND)
    queue = queued(one)
    order = queue.give_out(one, 0, 0.0, BLOCK)
    queue.give_up(one)
    assert queue.next_begun(BACKGROUND) is None and one.held == 1
    queue.take_back(order.number, 0)
    assert one.over and offsets(one) == [1, 2]
    queue.remove(one)
    assert queue.reads == {} and queue.depth == 0


def test_a_dead_readers_piece_of_what_was_given_up_is_not_read_again() -> None:
    one = read((0, 1), PREDICTED)
    queue = queued(one)
    queue.give_out(one, 0, 0.0, BLOCK)
    queue.give_up(one)
    assert queue.reader_lost(0) == [one]
    assert one.over and queue.next_begun(PREDICTED) is None
    queue.remove(one)
    assert queue.predictions_begun == 0


def test_a_wrong_guess_is_stopped_and_a_right_one_gets_its_rest_at_once() -> None:
    wrong, right, whole = (read((1, n), PREDICTED, pieces=1) for n in range(3))
    queue = queued(wrong, right, whole)
    steps = [queue.give_out(one, n, 0.0, BLOCK // 4) for n, one in enumerate((wrong, right))]
    queue.give_out(whole, 2, 0.0, BLOCK)
    assert queue.predictions() == [wrong, right], "the third cannot be stopped, and will be here"
    queue.give_up(wrong)
    for one in (right, whole):
        queue.promote(one)
        queue.promote(one)
    assert queue.take_revisions() == [(steps[0], True), (steps[1], False)]
    assert queue.take_revisions() == [] and queue.predictions() == []
