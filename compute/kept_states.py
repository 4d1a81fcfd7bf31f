"""Sequence states kept after a request, so that the next one starts where its prompt departs.

Owns the copies and their byte budget. A state cannot be rolled back to any position (its windows
are rings), so what is kept are snapshots at chosen lengths. A kept state is never changed; using it
gives the same numbers as running its tokens again in the same chunks.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from compute.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class KeptState:
    """The state after `tokens`, copied to the host, and the `logits` [V] they ended in (None where
    they were not asked for: at least one more token has to be run)."""

    tokens: tuple[int, ...]
    snapshot: Mapping[str, torch.Tensor | int]
    logits: torch.Tensor | None
    nbytes: int


class StateStore(Protocol):
    """Where states outlive the process, see `compute.snapshots`."""

    def save(self, state: KeptState) -> None: ...

    def longest(self, prompt: Sequence[int], longer_than: int) -> KeptState | None: ...

    def close(self) -> None: ...


class KeptStates:
    """Snapshots within `budget` bytes; the least recently used goes first. `store` keeps them
    longer, and is asked where it may have a longer beginning than memory."""

    def __init__(self, budget: int, store: StateStore | None = None) -> None:
        self._budget = budget
        self._store = store
        self._states: OrderedDict[tuple[int, ...], KeptState] = OrderedDict()
        self.nbytes = 0

    def keep(
        self, tokens: Sequence[int], state: SequenceState, logits: torch.Tensor | None = None
    ) -> None:
        """Copy `state`, which has run the first `state.length` of `tokens`. One that does not fit
        the budget by itself, or the memory there is, is not kept: keeping is only a saving."""
        key = tuple(tokens[: state.length])
        if not state.usable or not key:
            return
        # A token id is a Python int, 8 bytes of tuple; the int itself is the caller's too.
        nbytes = state.nbytes + 8 * len(key) + (logits.nbytes if logits is not None else 0)
        known = self._states.get(key)
        if known is not None and (logits is None or known.logits is not None):
            self._states.move_to_end(key)
            return
        if nbytes > self._budget:
            return
        try:
            snapshot = state.snapshot()
            held = logits.cpu() if logits is not None else None
        except (MemoryError, RuntimeError) as error:
            reason = str(error).partition("\n")[0] or "no memory left"
            print(f"a sequence state was not kept ({reason})", file=sys.stderr, flush=True)
            return
        kept = KeptState(key, snapshot, held, nbytes)
        self._remember(kept)
        if self._store is not None:
            self._store.save(kept)

    def longest(self, prompt: Sequence[int]) -> KeptState | None:
        """The longest kept beginning of `prompt` from which its last token's logits follow."""
        whole = tuple(prompt)
        best: KeptState | None = None
        for state in self._states.values():
            length = len(state.tokens)
            enough = length < len(whole) or state.logits is not None
            longer = best is None or length > len(best.tokens)
            if longer and enough and whole[:length] == state.tokens:
                best = state
        if self._store is not None:
            stored = self._store.longest(prompt, len(best.tokens) if best is not None else 0)
            if stored is not None:
                self._remember(stored)
                return stored
        if best is not None:
            self._states.move_to_end(best.tokens)
        return best

    def close(self) -> None:
        """Let the store finish what it is writing."""
        if self._store is not None:
            self._store.close()

    def _remember(self, kept: KeptState) -> None:
        if kept.tokens in self._states:
            self._drop(kept.tokens)
        if kept.nbytes > self._budget:
            return
        while self.nbytes + kept.nbytes > self._budget:
            self._drop(next(iter(self._states)))
        self._states[kept.tokens] = kept
        self.nbytes += kept.nbytes

    def _drop(self, key: tuple[int, ...]) -> None:
        self.nbytes -= self._states.pop(key).nbytes
