"""A disk that is slow or fails on purpose, between the row reader and the real one.

For developers and tests: what a `protocol.faults` description asks for, and a latency a read. It is
not even built where neither is given.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import time

import numpy as np
import numpy.typing as npt

from engram_io.block_reader import STALL_S
from engram_io.reader import ReadBlocks
from protocol.errors import StallError
from protocol.faults import Fault, FaultPlan

Int64 = npt.NDArray[np.int64]


class BrokenDisk:
    """Carries out reads through `read` and then spoils them. `latency` is what one read of a disk
    takes that serves `depth` at once."""

    def __init__(self, read: ReadBlocks, plan: FaultPlan, latency: float, depth: int) -> None:
        self._read = read
        self._plan = plan
        self._latency = latency
        self._depth = depth

    def __call__(self, file: Int64, offset: Int64, length: Int64, at: Int64) -> Int64:
        """As `BlockReader.read`."""
        results = self._read(file, offset, length, at)
        time.sleep(self._latency * math.ceil(len(results) / self._depth))
        for index in range(len(results)):
            for fault in self._plan.strike():
                results[index] = self._spoil(fault, int(results[index]))
        return results

    def _spoil(self, fault: Fault, result: int) -> int:
        if fault.action == "eio":
            return -errno.EIO
        if fault.action == "short":
            return min(result, 1)
        if fault.action == "delay":
            time.sleep(self._plan.delay(fault))
        elif fault.action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "hang":
            seconds = fault.seconds or STALL_S
            time.sleep(seconds)
            raise StallError(f"engram rows: a read without an answer for {seconds:g} s (provoked)")
        return result
