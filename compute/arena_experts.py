"""Routed experts out of the shared arena, demanded from the expert service where they are missing.

Owns compute's side of slot reclamation. Promises: a hit costs no message; what is resident is used
while what is missing lands; a wait has an end and a name; an arena of any size suffices, since at
most half as many experts as slots are demanded at once, and compute holds no slot while it waits.

Shared memory is the truth and a message only wakes: an expert is here when the directory says so,
or says that it is arriving and its readers have marked every piece of it. What is found after
`ProgressPage.holds_no_slot` keeps its bytes until the next call of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from compute.bounded_wait import BoundedWait
from compute.interruption import Interruption
from compute.progress import ProgressPage
from compute.slot_views import HeldExpert, SlotViews
from compute.sources import ExpertBytes
from protocol import counters
from protocol.errors import HeadraceError, ReadError, StallError
from protocol.layouts import ABSENT, Arena, Directory, entry_slot, look_up
from protocol.messages import Demand, DemandFailed, Hint, Landed
from protocol.trace import Tracer
from protocol.transport import Channel

ACCEPTS = (Landed, DemandFailed)
# Hits held at once: a slot taken out of the directory waits for at most this many to be computed.
HELD_AT_ONCE = 8


@dataclass(slots=True)
class _Outstanding:
    """A demand, whose experts are protected from eviction; `unused` are not yet handed out."""

    message: Demand
    unused: set[int]


class ArenaExperts:
    """The process group's ExpertSource; see `compute.sources` for the promises to its caller."""

    def __init__(
        self,
        channel: Channel,
        directory: Directory,
        arena: Arena,
        progress: ProgressPage,
        views: SlotViews,
        tracer: Tracer,
        *,
        stall_timeout: float,
        verify_slots: bool,
        busy_poll: float = 0.0,
        interruption: Interruption | None = None,
    ) -> None:
        """`stall_timeout` seconds without an expert's arrival end a wait with StallError; for its
        first `busy_poll` seconds a wait does not sleep. `verify_slots` compares slot generations
        after every use. `interruption` is asked at every layer and in every wait."""
        self._channel = channel
        self._directory = directory
        self._arena = arena
        self._progress = progress
        self._views = views
        self._tracer = tracer
        self._stall_timeout = stall_timeout
        self._busy_poll = busy_poll
        self._verify_slots = verify_slots
        self._interruption = interruption or Interruption()
        # The other half is for what prefetch brings and what reclamation has in hand.
        self._most_demanded = max(1, directory.slots // 2)
        self._outstanding: deque[_Outstanding] = deque()
        self._last_demand = 0
        self._said = (-1, -1)  # the step and layer whose picks were said last
        # What `hold` gave out, to be verified when it is let go: layer, expert, directory word.
        self._held: list[tuple[int, int, int]] = []
        self.counts = {
            counters.DEMAND_HITS: 0.0,
            counters.DEMAND_MISSES: 0.0,
            counters.STALL_EXPERT_S: 0.0,
            counters.HINTS_DROPPED: 0.0,
        }

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertBytes]]:
        pending = list(experts)
        words = self._enter(layer, pending)
        if ABSENT in words:
            self._demand_missing(layer, pending, words)
        return self._arrivals(layer, pending, words)

    def hold(
        self, layer: int, experts: Sequence[int], asking: Callable[[], None] | None = None
    ) -> list[HeldExpert]:
        """All of `experts` at once where they lie, until the next `release`, `hold` or `fetch`.

        `asking` is called before anything is demanded. The arena must have twice as many slots.
        Raises ReadError and StallError.
        """
        words = self._enter(layer, experts)
        if asking is not None and ABSENT in words:
            asking()
        # What is demanded stays until it is used, so a hit that goes meanwhile is demanded once.
        while ABSENT in words:
            self._demand_missing(layer, list(experts), words)
            absent = [e for e, word in zip(experts, words, strict=True) if word == ABSENT]
            self._wait(layer, absent)
            words = self.look_up(layer, experts)
        self._held = [(layer, e, word) for e, word in zip(experts, words, strict=True)]
        places = self._directory.place[layer]
        return [
            self._views.in_place(entry_slot(word), places[expert].tolist())
            for expert, word in zip(experts, words, strict=True)
        ]

    def read_until(self, event: torch.cuda.Event) -> None:
        """The device reads what is held now until `event`, which has been recorded."""
        self._views.read_until(event)

    def hint(
        self,
        layer: int,
        picks: Sequence[int],
        predicted_layer: int | None,
        predicted: Sequence[int],
        scores: Sequence[float],
    ) -> None:
        # What was said already needs no saying again but for an expert that is absent.
        routing = self._progress.step, layer
        if routing == self._said and (
            predicted_layer is None or ABSENT not in self.look_up(predicted_layer, predicted)
        ):
            return
        message = Hint(
            self._progress.step,
            layer,
            list(picks),
            -1 if predicted_layer is None else predicted_layer,
            list(predicted),
            list(scores),
        )
        if self._channel.send(message):
            self._said = routing
        else:
            self.counts[counters.HINTS_DROPPED] += 1

    def release(self) -> None:
        if self._outstanding:
            # Given up: nobody waits for these any more.
            self._outstanding.clear()
            self._progress.used(self._last_demand)
        # A device that still copies lets its slots go at the next fetch.
        if self._views.idle():
            self.let_go()

    def look_up(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Directory words of `experts`, ABSENT where one is not resident."""
        return look_up(self._directory, self._arena, layer, experts)

    def _enter(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Let the layer before go and count what is here of this one; its directory words."""
        self._progress.at_layer(layer)
        self._interruption.check()
        self.let_go()
        words = self.look_up(layer, experts)
        missing = words.count(ABSENT)
        self.counts[counters.DEMAND_HITS] += len(words) - missing
        self.counts[counters.DEMAND_MISSES] += missing
        if missing:
            # What earlier layers left unread, so that the queue never fills.
            self._hear(layer, 0)
        return words

    def _arrivals(
        self, layer: int, pending: list[int], words: list[int]
    ) -> Iterator[tuple[int, ExpertBytes]]:
        while True:
            here = [i for i, word in enumerate(words) if word != ABSENT][:HELD_AT_ONCE]
            for i in here:
                yield from self._use(layer, pending[i], words[i])
            taken = set(here)
            pending = [expert for i, expert in enumerate(pending) if i not in taken]
            if not pending:
                return
            # A long prompt picks every expert of a layer, which takes a CPU its time.
            self._interruption.check()
            self.let_go()
            words = self.look_up(layer, pending)
            # Besides what is still missing, a hit may have been evicted in the meantime.
            self._demand_missing(layer, pending, words)
            if all(word == ABSENT for word in words):
                words = self._wait(layer, pending)

    def _use(self, layer: int, expert: int, word: int) -> Iterator[tuple[int, ExpertBytes]]:
        slot = entry_slot(word)
        place = self._directory.place[layer, expert].tolist()
        yield expert, self._views.open(slot, place)
        if self._verify_slots:
            self._views.wait_idle()
            self._verify(layer, expert, word)
        for outstanding in self._outstanding:
            outstanding.unused.discard(expert)
        done = 0
        while self._outstanding and not self._outstanding[0].unused:
            done = self._outstanding.popleft().message.demand
        if done:
            # The slot of the last one stays held by the epoch.
            self._progress.used(done)

    def let_go(self) -> None:
        """Hold no slot any more, once the device has read what it still reads."""
        self._views.wait_idle()
        if self._verify_slots:
            for layer, expert, word in self._held:
                self._verify(layer, expert, word)
        self._held.clear()
        self._progress.holds_no_slot()

    def _verify(self, layer: int, expert: int, word: int) -> None:
        slot = entry_slot(word)
        generation = int(self._directory.generation[slot])
        if generation != word >> 32:
            raise HeadraceError(
                f"slot {slot} was rewritten while layer {layer} expert {expert} was read from "
                f"it (generation {word >> 32}, then {generation}); this is a defect, report it"
            )

    def _demand_missing(self, layer: int, pending: list[int], words: list[int]) -> None:
        """Demand what is absent and not yet demanded, as far as the bound allows."""
        asked = {e for outstanding in self._outstanding for e in outstanding.message.experts}
        absent = (e for e, word in zip(pending, words, strict=True) if word == ABSENT)
        missing = [expert for expert in absent if expert not in asked]
        room = self._most_demanded - len(asked)
        if len(missing) > room:
            # Small demands are done with sooner, which makes room for the next while these land.
            piece = max(1, self._most_demanded // 4)
            missing = missing[: room // piece * piece]
        else:
            piece = len(missing)
        for begin in range(0, len(missing), piece or 1):
            self._last_demand += 1
            demand = Demand(self._last_demand, layer, missing[begin : begin + piece])
            self._outstanding.append(_Outstanding(demand, set(demand.experts)))
            frame = demand.encode()
            self._progress.demands(frame)
            self._channel.send_frame(frame)

    def _wait(self, layer: int, pending: list[int]) -> list[int]:
        """Wait until one of `pending` is here; their directory words."""
        waiting = BoundedWait(self._stall_timeout, self._busy_poll)
        try:
            with self._tracer.span("wait for experts", layer=layer, experts=len(pending)):
                return self._await_any(layer, pending, waiting)
        finally:
            self.counts[counters.STALL_EXPERT_S] += waiting.seconds

    def _await_any(self, layer: int, pending: list[int], waiting: BoundedWait) -> list[int]:
        while True:
            self._hear(layer, waiting.nap())
            # Each time anew: the service may have taken out a victim after the last time.
            self._progress.holds_no_slot()
            words = self.look_up(layer, pending)
            if any(word != ABSENT for word in words):
                return words
            self._progress.beat()
            self._interruption.check()
            if waiting.exhausted:
                named = ", ".join(map(str, pending[:8])) + (", …" if len(pending) > 8 else "")
                raise StallError(
                    f"layer {layer}: experts {named} did not come within "
                    f"{waiting.seconds:.1f} s; is the disk still answering? "
                    "A slow one needs a longer stall timeout"
                )
            if waiting.time_to_repeat():
                for outstanding in self._outstanding:
                    self._channel.send(outstanding.message)

    def _hear(self, layer: int, seconds: float) -> None:
        """Take in messages, waiting for the first at most `seconds`. Raises ReadError where a
        demand that is still wanted has failed."""
        first = self._channel.receive(seconds)
        if first is None:
            return
        wanted = {outstanding.message.demand for outstanding in self._outstanding}
        for _, message in (first, *self._channel.drain()):
            if isinstance(message, DemandFailed) and message.demand in wanted:
                raise ReadError(f"layer {layer} expert {message.expert}: {message.reason}")
