"""Symptoms: half a pass taken for a whole one, a state that goes though it was just used, memory
beyond the budget, logits that were known and are computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch

from compute.kept_states import KeptState, KeptStates, StateStore
from compute.sequence import SequenceState
from tests.golden.harness import config

TOKENS = tuple(range(3, 60))
LOGITS = torch.arange(8.0)


def state(length: int) -> SequenceState:
    """A state that has run the first `length` of TOKENS."""
    made = SequenceState(config(), torch.device("cpu"))
    made.length = length
    return made


def size(length: int) -> int:
    return state(length).nbytes + 8 * length


def found(kept: KeptStates, prompt: Sequence[int]) -> int:
    """How many tokens of `prompt` need not be run."""
    best = kept.longest(prompt)
    return 0 if best is None else len(best.tokens)


class Store:
    """Has one state, hears of others, and is told when to end."""

    def __init__(self, state: KeptState | None = None) -> None:
        self.state = state
        self.saved: list[KeptState] = []
        self.closed = False

    def save(self, state: KeptState) -> None:
        self.saved.append(state)

    def longest(self, prompt: Sequence[int], longer_than: int) -> KeptState | None:
        known = self.state
        return known if known is not None and len(known.tokens) > longer_than else None

    def close(self) -> None:
        self.closed = True


def test_a_pass_that_failed_and_a_sequence_without_tokens_are_not_kept() -> None:
    kept = KeptStates(1 << 30)
    failed = state(5)
    failed.usable = False
    kept.keep(TOKENS, failed)
    kept.keep(TOKENS, state(0))
    assert kept.nbytes == 0 and kept.longest(TOKENS) is None


def test_the_longest_beginning_is_found_with_logits_where_it_is_all() -> None:
    kept = KeptStates(1 << 30)
    for length in (9, 5, 20):
        kept.keep(TOKENS, state(length))
    assert found(kept, TOKENS) == 20 and found(kept, TOKENS[:12]) == 9
    assert found(kept, TOKENS[:9]) == 5, "its last token's logits are wanted"
    assert found(kept, (1, *TOKENS)) == 0
    kept.keep(TOKENS, state(9), LOGITS)
    assert found(kept, TOKENS[:9]) == 9
    assert kept.nbytes == size(9) + size(5) + size(20) + LOGITS.nbytes


def test_what_is_known_is_not_copied_again_and_keeps_its_logits() -> None:
    store = Store()
    kept = KeptStates(1 << 30, cast(StateStore, store))
    kept.keep(TOKENS, state(9), LOGITS)
    kept.keep(TOKENS, state(9))
    kept.keep(TOKENS, state(9), LOGITS)
    assert len(store.saved) == 1
    best = kept.longest(TOKENS[:9])
    assert best is not None and best.logits is not None and torch.equal(best.logits, LOGITS)


def test_what_was_used_or_kept_again_stays_and_the_budget_holds() -> None:
    budget = size(5) + size(6) + size(7)
    kept = KeptStates(budget)
    for length in (5, 6, 7):
        kept.keep(TOKENS[-length:], state(length))
    assert kept.nbytes == budget
    assert found(kept, (*TOKENS[-5:], 1)) == 5
    kept.keep(TOKENS[-6:], state(6))
    kept.keep(TOKENS[:5], state(5))  # in the place of the one neither used nor kept again
    assert [found(kept, (*TOKENS[-n:], 1)) for n in (5, 6, 7)] == [5, 6, 0]
    assert kept.nbytes == 2 * size(5) + size(6) <= budget
    kept.keep(TOKENS, state(50))
    assert kept.nbytes <= budget


def test_what_exceeds_the_budget_is_not_copied_and_the_end_is_passed_on() -> None:
    for budget, kept_there in ((size(9), 1), (size(9) - 1, 0)):
        store = Store()
        kept = KeptStates(budget, cast(StateStore, store))
        kept.keep(TOKENS, state(9))
        assert len(store.saved) == kept_there
        kept.close()
        assert store.closed
    KeptStates(0).close()


def test_a_stored_state_is_remembered_where_memory_has_room_for_it() -> None:
    kept = KeptStates(1 << 30)
    kept.keep(TOKENS, state(9))
    stored = kept.longest(TOKENS)
    assert stored is not None
    for budget, remembered in ((size(9), size(9)), (size(9) - 1, 0)):
        store = cast(StateStore, Store(replace(stored)))
        small = KeptStates(budget, store)
        assert small.longest(TOKENS) == stored and small.nbytes == remembered
