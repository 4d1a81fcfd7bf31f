"""Which experts were hot in one run, kept for the start of the next.

Owns one small file a checkpoint. Heat is a count of picks that fades with the tokens. Promises: the
file is replaced at once and whole; one of another checkpoint, or a damaged one, is refused and
never used; nothing here fails a request.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from expert_io.policy import Key
from protocol.config import require_file
from protocol.errors import CheckpointError, ResourceError

FORMAT = "headrace warm experts 1"
# What a pick counts a thousand tokens later.
FADED_AFTER_1000 = 0.5
MOST_BYTES = 16 << 20
# Weights are brought back to 1 before they lose the smallest against the largest.
_RESCALE_AT = 1e6


class WarmSet:
    """The hot experts of the checkpoint of this `identity`, in `directory`."""

    def __init__(self, directory: Path, identity: str, layers: int, experts: int) -> None:
        self._directory = directory
        self._identity = identity
        self._heat = np.zeros((layers, experts))
        self._step = 0
        self._last = -1, -1
        self._weight = 1.0
        self._growth = FADED_AFTER_1000 ** (-1 / 1000)

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._directory / f"{self._identity}.json"

    def load(self) -> list[Key]:
        """The last run's experts, hottest first; none where there was no last run.

        They stay in the set, colder than anything this run picks. Raises CheckpointError for a file
        that cannot be used.
        """
        require_file(self.path)
        try:
            size = self.path.stat().st_size
            text = self.path.read_bytes() if size <= MOST_BYTES else b""
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._refused(f"cannot be read ({error.strerror})") from None
        try:
            kept = json.loads(text)
            made_by = (kept["format"], kept["identity"])
            shape, words = tuple(kept["shape"]), kept["experts"]
            sound = all(type(word) is int and 0 <= word < self._heat.size for word in words)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._refused("is damaged") from None
        if made_by != (FORMAT, self._identity) or shape != self._heat.shape:
            raise self._refused("belongs to another checkpoint")
        if not sound or len(set(words)) != len(words):
            raise self._refused("is damaged")
        width = self._heat.shape[1]
        for place, word in enumerate(words):
            self._heat.flat[word] = 0.5 * (1 - place / len(words))
        return [divmod(word, width) for word in words]

    def picked(self, step: int, layer: int, experts: Sequence[int]) -> None:
        """A pass used `experts` of `layer`; said again it counts once."""
        if (step, layer) == self._last:
            return
        self._last = step, layer
        if step != self._step:
            self._step = step
            self._weight *= self._growth
            if self._weight > _RESCALE_AT:
                self._heat /= self._weight
                self._weight = 1.0
        self._heat[layer, experts] += self._weight

    def hottest(self, most: int) -> list[Key]:
        """At most `most` experts that were picked at all, hottest first."""
        flat = self._heat.ravel()
        order = np.argsort(-flat, kind="stable")[: min(most, int((flat > 0).sum()))]
        return [divmod(int(word), self._heat.shape[1]) for word in order]

    def save(self, most: int) -> None:
        """Keep the `most` hottest. Raises ResourceError."""
        keys = self.hottest(most)
        if not keys:
            return
        width = self._heat.shape[1]
        kept = {
            "format": FORMAT,
            "identity": self._identity,
            "shape": list(self._heat.shape),
            "experts": [layer * width + expert for layer, expert in keys],
        }
        partial = self.path.with_suffix(f".{os.getpid()}")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(kept) + "\n", encoding="ascii")
            os.replace(partial, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise ResourceError(
                f"{self.path}: hot experts are not kept ({error.strerror}); the next start is cold"
            ) from None

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why}; this start is a cold one")
