"""What a running token and the host say to each other: the host's side of `compute.kernels.ask`.

Owns the memory between them. The device writes records into pinned host memory, one a layer; the
host's answers are copied to the device on a stream of its own, behind the experts they speak of.
Words carry the token's tag and the layer, so that what is left of an earlier token is never taken
for this one's, and one that has come only in part is one that has not come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from compute.bounded_wait import BoundedWait
from compute.sources import Addresses
from protocol.errors import StallError

_LOWER = 0xFFFFFFFF
# A pick's lower half: the expert, and whether it is absent from the device.
_EXPERT, _ABSENT = (1 << 31) - 1, 1 << 31
# Looks between two questions whether the device still works.
LOOKS = 500
# A layer takes a tenth of a millisecond; a device that says nothing for this long has stopped.
SILENCE_S = 30.0
# A pick's parts in the answer: six addresses, whether the host goes on, and one that stays 0.
PARTS, GO_ON = 8, 6


class Record(NamedTuple):
    """What a layer of the running token has routed: its `picks`, whether one of them `waits` for
    the answer since the device does not have it, and the marked `words` of what is predicted.

    The picks' launch is waited for, so all else is made of the words when it is asked for.
    """

    picks: list[int]
    waits: bool
    words: list[int]

    def guesses(self) -> tuple[list[int], list[float]]:
        """Predicted experts of the next layer, and their margins."""
        experts, margins = np.array(self.words, np.int64).astype(np.uint32).reshape(2, -1)
        return experts.tolist(), margins.view(np.float32).tolist()


class Mailbox:
    """For one token at a time of a model of `layers`, `picks` experts a token and `predictions`.

    `records` int64 [layers, W] and `status` int64 [1] are the device's to write, `answer` int64
    [picks, 8, 2] lies on the device and is written by `reply`, and `rows_here` int64 [1] likewise
    by `say_rows`.
    """

    def __init__(self, layers: int, picks: int, predictions: int, device: torch.device) -> None:
        self._layers, self._picks = layers, picks
        self._said = picks + 2 * predictions
        pinned = device.type == "cuda"
        width = 1 << (self._said - 1).bit_length()
        self.records = torch.zeros(layers, width, dtype=torch.int64, pin_memory=pinned)
        self._heard = list(self.records.numpy()[:, : self._said])
        self.status = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self.answer = torch.zeros(picks, PARTS, 2, dtype=torch.int64, device=device)
        self._staged = torch.zeros(picks, PARTS, 2, dtype=torch.int64, pin_memory=pinned)
        self.rows_here = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows_staged = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._tokens = 0
        self.tag = 0

    def begin(self) -> int:
        """The tag of another token; tag + layer is from 1 to 2^31 - 1 and not soon used again."""
        self._tokens = self._tokens % ((1 << 31) // self._layers - 1) + 1
        self.tag = self._tokens * self._layers
        return self.tag

    def wait(self, layer: int, running: Callable[[], bool]) -> Record | None:
        """The record of `layer`, once it is here; None where what would say it is no longer
        `running`. Raises StallError where the device says nothing at all."""
        silence = BoundedWait(SILENCE_S)
        while True:
            for _ in range(LOOKS):
                record = self.heard(layer)
                if record is not None:
                    return record
            if not running():
                return self.heard(layer)
            if silence.exhausted:
                raise StallError(
                    f"the device did not come to layer {layer} within {SILENCE_S:.0f} s"
                )

    def heard(self, layer: int) -> Record | None:
        """The record of `layer`, once all of it is here."""
        stamp, heard = self.tag + layer, self._heard[layer]
        # Most looks end here.
        if heard.item(0) >> 32 != stamp:
            return None
        # Python's own integers: so few words are dearer as an array.
        words: list[int] = heard.tolist()
        if min(words) < stamp << 32 or max(words) > stamp << 32 | _LOWER:
            return None
        picks, absent = [], 0
        for word in words[: self._picks]:
            picks.append(word & _EXPERT)
            absent |= word & _ABSENT
        return Record(picks, absent != 0, words[self._picks :])

    @property
    def gave_up(self) -> bool:
        """Whether a wait of this token has run out on the device, and what it computes is void."""
        return self.tag <= int(self.status.numpy()[0]) >> 32 < self.tag + self._layers

    def reply(self, layer: int, addresses: Addresses | None) -> None:
        """Answer `layer` with int64 [picks, 6], behind what the current stream has to do; None
        gives the token up."""
        parts = np.zeros((self._picks, PARTS), np.int64)
        if addresses is not None:
            parts[:, : addresses.shape[1]] = addresses
            parts[0, GO_ON] = 1
        # A word's lower half lies first here: every host of a CUDA device is little-endian.
        halves = self._staged.numpy().view(np.uint32).reshape(*parts.shape, 2, 2)
        halves[..., 0] = parts.view(np.uint32).reshape(*parts.shape, 2)
        halves[..., 1] = self.tag + layer
        self.answer.copy_(self._staged, non_blocking=True)

    def say_rows(self, layer: int, there: bool) -> None:
        """Tell `layer`, behind what the current stream has to do, that the token's engram rows are
        `there`; if they are not, the token is given up."""
        self._rows_staged[0] = (self.tag + layer) << 32 | there
        self.rows_here.copy_(self._rows_staged, non_blocking=True)
