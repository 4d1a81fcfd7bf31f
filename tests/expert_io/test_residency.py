"""What the residency promises, whatever the order of events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from expert_io.calibration import Calibration
from expert_io.scheduler import ExpectedGain, Guess
from protocol import counters
from protocol.layouts import ABSENT, entry_slot
from protocol.messages import BACKGROUND, PREDICTED, URGENT
from tests.expert_io.small_world import PIECES, Chaos, SmallWorld


@pytest.mark.parametrize("seed", range(40))
def test_no_interleaving_breaks_an_invariant(seed: int) -> None:
    chaos = Chaos(SmallWorld(slots=6 + seed % 8, policy=("lru", "adaptive")[seed % 2]), seed)
    for _ in range(600):
        chaos.turn()
    assert chaos.world.residency.counts[counters.EVICTIONS] > 0, "nothing was put to the test"


def test_the_interleavings_stop_wrong_guesses_too() -> None:
    stopped = 0
    for seed in range(4):
        chaos = Chaos(SmallWorld(slots=9), seed)
        for _ in range(6000):
            chaos.turn()
        stopped += chaos.stopped
    assert stopped > 20


@pytest.mark.parametrize("seed", range(40))
def test_every_demand_ends_once_events_settle(seed: int) -> None:
    chaos = Chaos(SmallWorld(slots=7), seed)
    for _ in range(300):
        chaos.turn()
    for demand, (layer, experts) in sorted(chaos.open.items()):
        for _ in range(50):
            chaos.world.residency.demand(demand, layer, sorted(experts))
            chaos.let_go()
            for reader in list(chaos.world.held):
                while chaos.world.held[reader]:
                    chaos.world.finish(reader)
            chaos.world.read_all()
        assert all(chaos.world.slot_of((layer, e)) is not None for e in experts)
        del chaos.open[demand]
        chaos.world.done_with(demand)


def test_a_demanded_expert_lands_and_is_announced_once() -> None:
    world = SmallWorld()
    assert world.residency.demand(1, 0, [4, 5]) == []
    assert sorted(world.read_all()) == [(1, 4), (1, 5)]
    assert world.residency.demand(1, 0, [4, 5]) == [4, 5], "a repeated demand is answered"
    assert world.residency.counts[counters.READS_URGENT] == 2


def test_a_demand_for_what_is_in_flight_waits_for_that_read_and_hurries_it() -> None:
    world = SmallWorld()
    world.hint(0, 0, [], 1, [7])
    first = world.take_order()
    assert first is not None and first.read.lane == PREDICTED
    world.residency.demand(1, 1, [7])
    assert first.read.lane == URGENT
    world.residency.demand(1, 1, [7])
    world.finish()
    landed = world.read_all()
    assert landed == [(1, 7)]
    assert world.residency.counts[counters.PREDICTED_LATE] == 1
    assert world.residency.counts[counters.READ_BYTES] == PIECES * 4096, "read once"


def test_urgent_pieces_overtake_predicted_ones_already_begun() -> None:
    world = SmallWorld()
    world.hint(0, 0, [], 1, [7])
    begun = world.take_order()
    world.residency.demand(1, 0, [3])
    following = world.take_order(reader=1)
    assert begun is not None and following is not None
    assert following.read.key == (0, 3)


def test_no_guess_is_read_beside_what_compute_waits_for() -> None:
    world = SmallWorld()
    world.hint(0, 0, [3], 1, [7])
    assert world.take_order() is None, "its demand is about to come"
    world.residency.demand(1, 0, [3])
    for reader in range(PIECES):
        order = world.take_order(reader)
        assert order is not None and order.read.key == (0, 3)
    assert world.take_order(reader=PIECES) is None
    for reader in range(PIECES):
        world.finish(reader)
    order = world.take_order()
    assert order is not None and order.read.key == (1, 7)


def test_a_demand_ends_guesses_for_layers_before_it_though_their_hint_was_lost() -> None:
    world = SmallWorld()
    world.hint(5, 0, [], 1, [7])
    assert world.take_order() is not None
    world.residency.demand(1, 2, [3])
    assert world.finish().landed == []
    assert world.read_all() == [(1, 3)]
    assert world.slot_of((1, 7)) is None


def test_what_reads_take_and_when_compute_has_what_it_waited_for_is_learned() -> None:
    world = SmallWorld()
    for layer, begin in ((0, 1.0), (1, 10.0)):
        world.residency.hint(0, layer, [3], -1, [], [], begin)
        world.residency.demand(layer + 1, layer, [3], begin)
        for piece in range(PIECES):
            order = world.residency.next_order(0, begin)
            assert order is not None
            world.residency.done(order.number, 0, 0.5, begin + piece)
    assert world.scheduler.disk.seconds(4096, 1) == 0.5
    # The second layer was routed 7 s after the first had its last piece, at 3; this one had at 12.
    assert world.scheduler.pace.until(12.0) == 7.0


def test_predictions_in_flight_are_bounded() -> None:
    world = SmallWorld(predicted_in_flight=2)
    world.hint(0, 0, [], 1, [1, 2, 3, 4])
    keys = set()
    for reader in range(8):
        order = world.take_order(reader)
        if order is not None:
            keys.add(order.read.key)
    assert keys == {(1, 1), (1, 2)}


class Believing(ExpectedGain):
    """Takes a score for the probability, and that for the gain."""

    def gain(self, now: float, guess: Guess, nbytes: int, busy: int, *, evicts: bool) -> float:
        return guess.probability


def say(world: SmallWorld, layer: int, ahead: int, named: Sequence[tuple[int, float]]) -> None:
    experts, scores = zip(*named, strict=True)
    world.residency.hint(0, layer, [], ahead, experts, scores)


def test_a_likelier_guess_is_begun_before_another_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibration, "probability", lambda self, score: score)
    world = SmallWorld(scheduler=Believing())
    say(world, 0, 2, [(5, 0.7)])
    orders = [world.take_order(0)]
    say(world, 0, 1, [(6, 0.9)])
    orders += [world.take_order(reader) for reader in range(1, 2 * PIECES)]
    keys = [order.read.key for order in orders if order is not None]
    assert keys == [(2, 5), *[(1, 6)] * PIECES, *[(2, 5)] * (PIECES - 1)]


def test_a_guess_being_read_is_believed_as_the_nearest_layer_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Calibration, "probability", lambda self, score: score)
    world = SmallWorld(scheduler=Believing())
    say(world, 0, 2, [(5, 0.8), (6, 0.7)])
    orders = [world.take_order(0)]
    say(world, 1, 2, [(5, 0.7), (6, 0.9)])
    orders += [world.take_order(reader) for reader in range(1, 2 * PIECES)]
    keys = [order.read.key for order in orders if order is not None]
    assert keys == [(2, 5), *[(2, 6)] * PIECES, *[(2, 5)] * (PIECES - 1)]


def test_predictions_are_dropped_when_their_layer_has_been_routed() -> None:
    world = SmallWorld(predicted_in_flight=1)
    world.hint(0, 0, [], 1, [1, 2, 3])
    assert world.take_order() is not None
    world.hint(0, 1, [5], 2, [])
    assert world.residency.counts[counters.PREDICTED_DROPPED] == 2
    world.finish()
    assert world.take_order() is None, "the rest of a given-up read is not read"
    assert world.residency.queue.reads == {}
    assert world.slot_of((1, 1)) is None


def test_an_early_prediction_counts_as_used_when_its_layer_picks_it() -> None:
    world = SmallWorld()
    world.hint(0, 0, [], 1, [1, 2])
    world.read_all()
    world.hint(0, 1, [1, 3], 2, [])
    assert world.residency.counts[counters.PREDICTED_ISSUED] == 2
    assert world.residency.counts[counters.PREDICTED_USED] == 1


def test_a_guess_that_has_landed_stays_until_its_layer_is_routed() -> None:
    """With a policy that gives up the least used, an expert never used before would go first."""
    world = SmallWorld(slots=6, reserve=2, policy="adaptive")
    world.hint(0, 0, [0, 1, 3], 2, [7])
    world.residency.demand(1, 0, [0, 1, 3])
    for _ in range(3):
        world.read_all()
        world.done_with(1)
        world.bump_epoch()
    assert world.slot_of((2, 7)) is not None
    world.residency.demand(2, 1, [4, 5])
    world.read_all()
    world.done_with(2)
    for expert in (0, 1, 2):
        world.bump_epoch()
        world.residency.demand(3 + expert, 1, [expert])
        world.read_all()
        world.done_with(3 + expert)
    assert world.slot_of((2, 7)) is not None
    world.hint(0, 2, [1], -1, [])
    world.residency.demand(9, 2, [1])
    world.read_all()
    assert world.slot_of((2, 7)) is None


def test_picks_that_are_here_count_as_uses() -> None:
    world = SmallWorld(slots=3, reserve=0)
    world.residency.demand(1, 0, [0, 1])
    world.read_all()
    world.done_with(1)
    world.hint(1, 0, [0], -1, [])
    world.residency.demand(2, 1, [5, 6])
    world.take_order()
    world.finish()
    world.bump_epoch()
    world.read_all()
    assert world.slot_of((0, 0)) is not None and world.slot_of((0, 1)) is None


def test_a_guess_takes_a_slot_of_the_reserve_and_evicts_nothing() -> None:
    world = SmallWorld(slots=3, reserve=2, predicted_in_flight=1)
    world.residency.demand(1, 0, [0])
    world.read_all()
    world.done_with(1)
    world.hint(1, 0, [0], 1, [7])
    order = world.take_order()
    assert order is not None and order.read.key == (1, 7)
    assert world.residency.counts[counters.EVICTIONS] == 0


def test_bytes_read_for_a_wrong_guess_are_wasted_once_it_goes() -> None:
    world = SmallWorld(slots=2, reserve=1, predicted_in_flight=1)
    wasted = world.residency.counts
    world.hint(1, 0, [], 1, [7])
    world.take_order()
    world.finish()
    world.hint(1, 1, [], -1, [])
    assert wasted[counters.PREDICTED_WASTED_BYTES] == 4096, "given up after its first piece"
    world.bump_epoch()
    world.hint(2, 0, [], 1, [7])
    world.read_all()
    world.hint(2, 1, [], -1, [])
    assert wasted[counters.PREDICTED_WASTED_BYTES] == 4096, "it may be picked yet"
    world.residency.demand(1, 0, [0])
    world.read_all()
    world.bump_epoch()
    world.residency.demand(2, 0, [1])
    world.read_all()
    assert world.slot_of((1, 7)) is None
    assert wasted[counters.PREDICTED_WASTED_BYTES] == (1 + PIECES) * 4096


def test_a_wrong_guess_is_stopped_in_the_middle_of_its_last_piece() -> None:
    world = SmallWorld(predicted_in_flight=2)
    world.hint(1, 0, [], 1, [7, 6])
    for reader in range(2 * PIECES):
        world.take_order(reader)
    world.hint(1, 1, [6], -1, [])
    assert world.heed() == PIECES, "the picked one goes on"
    assert world.residency.counts[counters.PREDICTED_WASTED_BYTES] == PIECES * 4096 // 2
    world.bump_epoch()
    world.residency.demand(1, 1, [7])
    for reader in range(PIECES, 2 * PIECES):
        world.finish(reader)
    world.read_all()
    assert world.slot_of((1, 6)) is not None and world.slot_of((1, 7)) is not None


def test_a_guess_demanded_while_it_is_being_stopped_is_read_again() -> None:
    world = SmallWorld(predicted_in_flight=1)
    world.hint(1, 0, [], 1, [7])
    for reader in range(PIECES):
        world.take_order(reader)
    world.hint(1, 1, [], -1, [])
    world.residency.demand(1, 1, [7])
    world.heed()
    assert world.slot_of((1, 7)) is None
    assert world.read_all() == [(1, 7)]


def test_a_demand_gets_a_slot_even_if_only_expected_guesses_could_go() -> None:
    world = SmallWorld(slots=4, reserve=1, predicted_in_flight=2)
    for expert in range(4):
        world.hint(0, 0, [], 2, [expert])
        world.read_all()
    world.bump_epoch()
    world.residency.demand(1, 0, [1, 2])
    world.read_all()
    world.bump_epoch()
    assert world.read_all() or world.slot_of((0, 2)) is not None
    assert world.slot_of((0, 1)) is not None


def test_harmful_evictions_are_counted() -> None:
    world = SmallWorld(slots=4, reserve=1, predicted_in_flight=1)
    world.residency.demand(1, 0, [0, 1, 2])
    world.read_all()
    world.done_with(1)
    world.hint(9, 0, [1, 2], 1, [7])
    world.read_all()
    world.bump_epoch()
    world.read_all()
    assert world.slot_of((1, 7)) is not None and world.slot_of((0, 0)) is None
    world.residency.demand(2, 0, [0])
    assert world.residency.counts[counters.HARMFUL_EVICTIONS] == 1


def test_a_miss_finds_a_reserved_slot_without_waiting_for_the_epoch() -> None:
    world = SmallWorld(slots=8, reserve=2)
    for demand in range(1, 5):
        world.residency.demand(demand, demand % 3, [demand, demand + 1])
        world.read_all()
        world.done_with(demand)
        world.bump_epoch()
    world.residency.demand(9, 2, [7, 6])
    assert sorted(world.read_all()) == [(9, 6), (9, 7)]


def test_a_retired_slot_is_not_reused_before_compute_lets_go() -> None:
    world = SmallWorld(slots=3, reserve=1)
    world.residency.demand(1, 0, [0, 1])
    world.read_all()
    world.done_with(1)
    before = world.directory.generation.copy()
    world.residency.demand(2, 1, [0, 1])
    world.read_all()
    seen = [slot for slot in range(3) if world.directory.generation[slot] != before[slot]]
    assert len(seen) <= 1, "only the free slot may be written before the epoch moves"
    world.bump_epoch()
    world.read_all()
    world.bump_epoch()
    world.read_all()
    assert world.slot_of((1, 0)) is not None and world.slot_of((1, 1)) is not None


def test_open_demands_are_not_evicted_by_later_ones() -> None:
    world = SmallWorld(slots=6, reserve=1)
    world.residency.demand(1, 0, [0, 1])
    world.read_all()
    world.residency.demand(2, 1, [2, 3, 4, 5])
    for _ in range(4):
        world.bump_epoch()
        world.read_all()
    assert world.slot_of((0, 0)) is not None and world.slot_of((0, 1)) is not None
    assert world.residency.blocked or world.residency.queue.depth == 0


def test_a_failed_read_frees_its_slot_and_can_be_tried_again() -> None:
    world = SmallWorld(slots=4)
    world.residency.demand(1, 0, [3])
    order = world.take_order()
    assert order is not None
    assert world.residency.failed(order.number, 1, "not this reader's order").failed == []
    outcome = world.fail("shard: EIO at 0")
    assert outcome.failed == [(1, 3, "shard: EIO at 0")]
    assert world.residency.counts[counters.READ_FAILURES] == 1
    world.bump_epoch()
    world.residency.slots.reclaim()
    assert world.residency.slots.free == 4 and world.slot_of((0, 3)) is None
    world.done_with(1)
    world.residency.demand(2, 0, [3])
    assert world.read_all() == [(2, 3)]


def test_a_failing_piece_waits_for_the_pieces_other_readers_still_write() -> None:
    world = SmallWorld(slots=4)
    world.residency.demand(1, 0, [3])
    first, second = world.take_order(0), world.take_order(1)
    assert first is not None and second is not None
    assert world.residency.failed(first.number, 0, "EIO").failed == []
    assert world.residency.slots.free == 3, "reader 1 may still write there"
    assert world.residency.done(second.number, 1).failed == [(1, 3, "EIO")]
    world.bump_epoch()
    world.residency.slots.reclaim()
    assert world.residency.slots.free == 4


def test_a_dead_readers_orders_go_out_again_and_its_late_answers_are_ignored() -> None:
    world = SmallWorld()
    world.residency.demand(1, 0, [3])
    lost = world.take_order(reader=0)
    assert lost is not None
    world.lose_reader(0)
    again = world.take_order(reader=1)
    assert again is not None and again.piece == lost.piece and again.number != lost.number
    assert world.residency.done(lost.number, 0).landed == []
    assert world.residency.done(again.number, 0).landed == [], "not this reader's order"
    world.finish(reader=1)
    assert world.read_all() == [(1, 3)]


def test_an_expert_is_found_once_its_last_piece_is_there_and_before_the_service_hears_it() -> None:
    world = SmallWorld()
    world.residency.demand(1, 0, [3])
    for reader in range(PIECES):
        assert world.found(0)[3] == ABSENT
        assert world.take_order(reader) is not None
        world.read(reader)
    word = world.found(0)[3]
    assert word != ABSENT and world.slot_of((0, 3)) is None
    world.done_with(1)
    world.take_order()  # the service looks at compute's progress: nobody waits any more
    for reader in range(PIECES):
        assert world.finish(reader).landed == []
    assert world.found(0)[3] == word and world.slot_of((0, 3)) == entry_slot(word)


def test_a_read_that_waits_for_compute_to_let_go_says_so() -> None:
    world = SmallWorld(slots=2, reserve=0)
    assert not world.residency.blocked
    world.residency.demand(1, 0, [3, 4])
    world.read_all()
    world.done_with(1)
    world.residency.demand(2, 1, [5])
    assert world.take_order() is None and world.residency.blocked
    world.bump_epoch()
    assert world.take_order() is not None and not world.residency.blocked


def test_a_guess_that_waits_for_compute_to_let_go_says_so() -> None:
    world = SmallWorld(slots=2, reserve=0, predicted_in_flight=1)
    world.residency.demand(1, 0, [3, 4])
    world.read_all()
    world.done_with(1)
    world.hint(0, 0, [], 1, [7])
    assert world.take_order() is None and world.residency.blocked
    world.bump_epoch()
    assert world.take_order() is not None and not world.residency.blocked


def test_pieces_of_an_earlier_read_do_not_make_a_later_one_whole() -> None:
    world = SmallWorld(slots=1, reserve=0)
    world.residency.demand(1, 0, [3])
    world.read_all()
    world.done_with(1)
    world.residency.demand(2, 1, [4])
    assert world.take_order() is None, "compute may still read the only slot"
    world.bump_epoch()
    assert world.take_order() is not None, "it takes the slot of the first"
    assert world.found(1)[4] == ABSENT and world.found(0)[3] == ABSENT


def test_a_read_given_up_keeps_its_slot_until_compute_has_let_go() -> None:
    """Its last reader died after the last byte: compute may have found the expert."""
    world = SmallWorld(slots=4)
    world.hint(0, 0, [], 1, [5])
    for _ in range(PIECES - 1):
        world.take_order()
        world.finish()
    world.take_order()
    world.read()
    word = world.found(1)[5]
    assert word != ABSENT
    world.lose_reader(0)
    world.hint(0, 1, [0], 2, [])
    assert world.found(1)[5] == ABSENT
    generation = int(world.directory.generation[entry_slot(word)])
    assert generation == word >> 32 and world.residency.slots.free == 3
    world.bump_epoch()
    world.residency.slots.reclaim()
    assert world.residency.slots.free == 4


def test_a_guess_found_before_the_service_hears_of_it_was_used() -> None:
    world = SmallWorld()
    world.hint(0, 0, [], 1, [5])
    for reader in range(PIECES):
        world.take_order(reader)
        world.read(reader)
    assert world.found(1)[5] != ABSENT, "so that compute demands nothing"
    world.hint(0, 1, [5], 2, [])
    for reader in range(PIECES):
        world.finish(reader)
    assert world.residency.counts[counters.PREDICTED_USED] == 1
    assert world.residency.counts[counters.PREDICTED_LATE] == 0


def test_background_reads_use_only_free_slots_and_come_last() -> None:
    world = SmallWorld(slots=5, reserve=2)
    world.residency.warm([(0, e) for e in range(8)])
    world.residency.demand(1, 1, [1])
    first = world.take_order()
    assert first is not None and first.read.lane == URGENT
    world.finish()
    world.read_all()
    assert world.residency.counts[counters.EVICTIONS] == 0
    assert world.residency.counts[counters.READS_BACKGROUND] == 2
    assert all(read.lane == BACKGROUND for read in world.residency.queue.reads.values())


def test_abandoned_demands_stop_what_has_not_begun() -> None:
    world = SmallWorld()
    world.residency.demand(1, 0, [1, 2, 3])
    assert world.take_order() is not None
    world.done_with(1)
    world.finish()
    world.read_all()
    assert world.residency.counts[counters.READS_URGENT] == 1


def test_what_is_queued_ahead_at_a_reader_is_urgent_only() -> None:
    world = SmallWorld()
    world.hint(0, 0, [], 1, [7])
    world.residency.warm([(2, 2)])
    assert world.residency.next_order(0, 0.0, urgent_only=True) is None
    world.residency.demand(1, 0, [3])
    order = world.residency.next_order(0, 0.0, urgent_only=True)
    assert order is not None and order.read.key == (0, 3)
