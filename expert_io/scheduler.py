"""Which predicted expert to read next, and whether to read one at all: a decision by expected gain.

Owns the guesses that compute has published and what was measured about them: how often a guess of
its kind came true, how long until the next layer is routed, how long a piece takes to read, how
often a layer misses, how often a victim is wanted back. Does no I/O and reads no clock.

A piece of a guess is worth reading now if

    p o  >  (1 - p) (m b + v t)

in seconds of compute's waiting: with probability `p` the expert is picked, and then the part `o` of
the piece's `t` seconds in which the disk would idle before that need not be waited for: all up to
the next routing, and of what lies between that and its own layer's as much as misses nothing, since
what is read beside a miss holds that up for as long. If it is not picked, then with probability `m`
the next layer misses, and its reads wait for the part `b` of the piece that lies after that layer's
routing; and with probability `v` the expert that gave up its slot is wanted back, more often than
the guess itself is used later. (If the guess is right, then both costs would have come anyway.) So
a far layer is read for when a read takes longer than a layer and the near ones miss little, and
nothing is begun just before a routing that will tell. What is too unlikely is not read, however
idle the disk (`LeastProbability`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from expert_io.calibration import Calibration
from expert_io.least_probability import LeastProbability
from expert_io.policy import Key
from expert_io.returns import Returns
from expert_io.slices import BLOCK
from protocol.layouts import align_up

# Weight of the newest sample in every running mean.
NEWEST = 0.1
# A predicted piece is read in steps of about this long, between which it can be stopped. A step
# costs a system call and the disk's latency.
STEP_S = 0.001


class Mean:
    """A running mean that forgets; `start` before the first sample."""

    def __init__(self, start: float = 0.0) -> None:
        self.value = start
        self._samples = 0

    def add(self, sample: float) -> None:
        self._samples += 1
        self.value += max(NEWEST, 1 / self._samples) * (sample - self.value)


class Pace:
    """When the next layer will be routed, going by the layers before.

    Compute reaches the next routing some time after it had the last thing it waited for: this
    layer's routing where nothing was missing, else the last landing. Both times are kept.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._waited = False
        self._layer = -1
        self._after = {False: Mean(), True: Mean()}

    @property
    def next_layer(self) -> int:
        """The layer that is routed next, within a pass."""
        return self._layer + 1

    def routed(self, now: float, layer: int) -> None:
        """Compute has come to `layer`."""
        # From one pass to the next there is sampling, and perhaps a pause.
        if self._layer >= 0 and layer == self._layer + 1:
            self._after[self._waited].add(now - self._since)
        self._since, self._waited, self._layer = now, False, layer

    def landed(self, now: float) -> None:
        """What compute waits for has come."""
        self._since, self._waited = now, True

    def until(self, now: float, layer: int = 0) -> float:
        """Seconds until `layer`, or the next one, is routed if nothing is waited for on the way."""
        following = self._since + self._after[self._waited].value
        whole = self._after[False].value or self._after[True].value
        return max(0.0, following - now) + max(0, layer - self._layer - 1) * whole


class DiskPace:
    """How long reads take by how many are under way, and so what one more of them brings."""

    def __init__(self) -> None:
        self._seconds_per_byte: dict[int, Mean] = {}

    def read(self, nbytes: int, seconds: float, beside: int) -> None:
        """A piece took `seconds` while `beside` readers were busy, its own included."""
        self._seconds_per_byte.setdefault(beside, Mean()).add(seconds / nbytes)

    def seconds(self, nbytes: int, beside: int) -> float:
        """What a piece would take; 0 before anything was read."""
        return nbytes * self._rate(beside)

    def step(self, nbytes: int, beside: int) -> int:
        """Bytes of a piece of `nbytes` to read at a time, whole blocks: all where that is quick."""
        steps = min(nbytes // BLOCK, int(self.seconds(nbytes, beside) / STEP_S))
        return align_up(-(-nbytes // steps), BLOCK) if steps > 1 else nbytes

    def adds(self, busy: int) -> float:
        """How much one reader beside `busy` others adds, as a share of what one alone reads."""
        if not busy or not self._seconds_per_byte:
            return 1.0
        more = (busy + 1) / self._rate(busy + 1) - busy / self._rate(busy)
        return min(1.0, max(0.0, more * self._rate(1)))

    def _rate(self, beside: int) -> float:
        """Seconds a byte. What was never seen is taken to share the disk's bandwidth evenly, so
        that few reads at once look good until they are tried, but to be no slower than what was
        seen beside more."""
        known = self._seconds_per_byte
        if not known:
            return 0.0
        nearest = min(known, key=lambda number: abs(number - beside))
        beside_more = [mean.value for number, mean in known.items() if number >= beside]
        return min([known[nearest].value * beside / nearest, *beside_more])


@dataclass(frozen=True, slots=True)
class Guess:
    """`key` will be picked at its layer in pass `step`, with `probability`."""

    key: Key
    step: int
    probability: float

    @property
    def due(self) -> tuple[int, int]:
        """The (step, layer) it is for."""
        return self.step, self.key[0]


@dataclass(frozen=True, slots=True)
class _Saying:
    """Experts with scores that were `named` when layer `here` was the last one routed."""

    here: int
    calibration: Calibration
    named: tuple[tuple[int, float], ...]


class ExpectedGain:
    """Reads what is worth it; see the module's docstring."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.disk = DiskPace()
        self.returns = Returns()
        self.least = LeastProbability()
        self._guesses: dict[Key, Guess] = {}
        self._begun: dict[Key, tuple[int, int]] = {}
        self._said: dict[tuple[int, int], list[_Saying]] = {}
        self._calibrations: dict[tuple[int, int, int], Calibration] = {}
        self._misses = Mean(1.0)

    # --- what is learned --------------------------------------------------------------------------

    def predicted(
        self, now_at: tuple[int, int], layer: int, named: Sequence[tuple[int, float]], count: int
    ) -> None:
        """At (step, layer) `now_at` the absent ones of `count` named experts of `layer`, with
        scores."""
        step, here = now_at
        said = self._said.setdefault((step, layer), [])
        # What is said of a layer once more from the same distance has seen more. A pass over many
        # tokens names many experts, and more of them come true.
        before = sum(saying.here == here for saying in said)
        kind = (layer - here, before, count.bit_length())
        calibration = self._calibrations.setdefault(kind, Calibration())
        said.append(_Saying(here, calibration, tuple(named)))
        # What a nearer layer says replaces it all: it has seen more.
        for key in [k for k, g in self._guesses.items() if g.due == (step, layer)]:
            del self._guesses[key]
        for expert, score in named:
            probability = calibration.probability(score)
            key = (layer, expert)
            self._guesses[key] = Guess(key, step, probability)

    def routed(self, now: float, step: int, layer: int, picks: Iterable[int], missing: bool) -> int:
        """`layer` picked `picks`, some of them `missing`; how many guesses this ended unread."""
        self.pace.routed(now, layer)
        self._misses.add(missing)
        chosen = set(picks)
        for at in [at for at in self._said if at <= (step, layer)]:
            for saying in self._said.pop(at):
                for expert, score in saying.named if at == (step, layer) else ():
                    saying.calibration.learn(score, expert in chosen)
        for key in [key for key, due in self._begun.items() if due <= (step, layer)]:
            if self._begun.pop(key) == (step, layer):
                self.least.learn(key[1] in chosen)
        return self.drop_until((step, layer))

    def drop_until(self, passed: tuple[int, int]) -> int:
        """Forget guesses for (step, layer) `passed` and before; how many."""
        late = [key for key, guess in self._guesses.items() if guess.due <= passed]
        for key in late:
            del self._guesses[key]
        return len(late)

    # --- what is decided --------------------------------------------------------------------------

    @property
    def promising(self) -> int:
        """How many guesses that nobody reads yet are likely enough to be read."""
        return sum(g.probability >= self.least.value for g in self._guesses.values())

    def best(self, now: float, nbytes: int, busy: int, above: float = 0.0) -> Guess | None:
        """The guess whose first piece, of `nbytes`, is most worth reading now, beside `busy`
        readers; None if no gain is `above` that."""
        best, most = None, above
        for guess in self._guesses.values():
            if guess.probability < self.least.value:
                continue
            gain = self.gain(now, guess, nbytes, busy, evicts=True)
            if gain > most:
                best, most = guess, gain
        return best

    def begun(self, guess: Guess) -> None:
        """`guess` is being read."""
        self.taken(guess.key)
        self._begun[guess.key] = guess.due

    def taken(self, key: Key) -> Guess | None:
        """`key` is resident or being read: no guess any more. What was guessed of it."""
        return self._guesses.pop(key, None)

    def gain(self, now: float, guess: Guess, nbytes: int, busy: int, *, evicts: bool) -> float:
        """Seconds of waiting that reading a piece of `nbytes` now is expected to save."""
        takes = self.disk.seconds(nbytes, busy + 1)
        next_routing, routing = self.pace.until(now), self.pace.until(now, guess.key[0])
        idle = next_routing + (1 - self._misses.value) * (routing - next_routing)
        overlapped = min(takes, idle) * self.disk.adds(busy)
        blocked = takes - min(takes, next_routing)
        if guess.key[0] == self.pace.next_layer:
            # The routing after which others wait for it also tells that it is wrong.
            step = self.disk.step(nbytes, busy + 1)
            blocked = min(blocked, self.disk.seconds(step, busy + 1))
        wrong = self._misses.value * blocked
        if evicts:
            wrong += self.returns.regret * takes
        return guess.probability * overlapped - (1 - guess.probability) * wrong


class Eager(ExpectedGain):
    """Reads every guess in the order published, whatever it costs: what prefetch was before."""

    @property
    def promising(self) -> int:
        return len(self._guesses)

    def best(self, now: float, nbytes: int, busy: int, above: float = 0.0) -> Guess | None:
        return None if above else next(iter(self._guesses.values()), None)

    def gain(self, now: float, guess: Guess, nbytes: int, busy: int, *, evicts: bool) -> float:
        return 1.0
