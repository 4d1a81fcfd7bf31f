"""A developer's and the tests' way to break reads on purpose, described by a short string.

Grammar: comma-separated `action[:key=value…]`, for example
`delay:seconds=0.05:every=3,eio:expert=2.5:times=1,short:every=10,die:after=4,hang:after=2`.
An empty description is no fault at all, which is what runs outside tests have.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from protocol.errors import UsageError

MOST_SECONDS = 3600.0
ACTIONS = ("delay", "eio", "short", "die", "hang")


@dataclass(slots=True)
class Fault:
    """One rule. It strikes at read number `after` and later, every `every`-th read, at most `times`
    times (0: no limit), only for `expert` (layer, expert) if given. `seconds` is a delay's length,
    random up to it where `jitter` is 1."""

    action: str
    seconds: float = 0.0
    jitter: int = 0
    every: int = 1
    after: int = 0
    times: int = 0
    expert: tuple[int, int] | None = None
    struck: int = 0


@dataclass(slots=True)
class FaultPlan:
    """The rules of one process; `strike` tells which of them meet a read."""

    faults: list[Fault]
    reads: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> FaultPlan:
        """Raises UsageError naming the part that is not understood."""
        faults = [_parse_one(part) for part in text.split(",") if part]
        return cls(faults, random=random.Random(seed))

    def strike(self, layer: int = -1, expert: int = -1) -> list[Fault]:
        """The faults that meet the next read, in the order they were written."""
        if not self.faults:
            return []
        self.reads += 1
        met = []
        for fault in self.faults:
            if fault.expert is not None and fault.expert != (layer, expert):
                continue
            if self.reads <= fault.after or (self.reads - fault.after - 1) % fault.every:
                continue
            if fault.times and fault.struck >= fault.times:
                continue
            fault.struck += 1
            met.append(fault)
        return met

    def delay(self, fault: Fault) -> float:
        """Seconds a `delay` fault takes this time."""
        return fault.seconds * self.random.random() if fault.jitter else fault.seconds


def _parse_one(part: str) -> Fault:
    action, *pairs = part.split(":")
    if action not in ACTIONS:
        raise UsageError(f"fault {part!r}: expected one of {', '.join(ACTIONS)}")
    fault = Fault(action)
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            if key == "expert":
                layer, expert = value.split(".")
                fault.expert = (int(layer), int(expert))
            elif key == "seconds":
                fault.seconds = float(value)
            elif key in ("jitter", "every", "after", "times"):
                setattr(fault, key, int(value))
            else:
                raise ValueError
        except ValueError:
            raise UsageError(f"fault {part!r}: {pair!r} is not understood") from None
    # Written so that it is false for NaN too.
    if not 0 <= fault.seconds <= MOST_SECONDS:
        raise UsageError(f"fault {part!r}: seconds must be from 0 to {MOST_SECONDS:.0f}")
    if fault.every < 1:
        raise UsageError(f"fault {part!r}: every must be at least 1")
    return fault
