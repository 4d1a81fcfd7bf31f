"""File ranges into memory by preadv: O_DIRECT where the file system takes it, else buffered.

Owns the open files of a reader. Promises: at least `needed` bytes arrived or ReadError names file
and offset; short reads and interruptions are continued; EIO is tried again a few times; what a
buffered read left in the page cache is dropped, so that the cache does not crowd out the arena.
Never maps a file: a page fault a 4 KiB costs a tenth of the disk's speed.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence

from expert_io.slices import BLOCK
from protocol.errors import ReadError

ATTEMPTS = 3
RETRY_S = 0.02

Preadv = Callable[[int, Sequence[memoryview], int], int]


class ShardFiles:
    """Files by number, opened when first read. `preadv` is exchangeable so that tests break it."""

    def __init__(self, paths: Sequence[str], direct: bool, preadv: Preadv = os.preadv) -> None:
        self._paths = paths
        self._preadv = preadv
        self._descriptors: dict[int, int] = {}
        self.direct = direct and takes_direct(paths[0], preadv)

    def read(self, file: int, offset: int, needed: int, memory: memoryview) -> None:
        """Fill `memory` from `offset`; the file may end after `needed` bytes. Raises ReadError."""
        attempt = 1
        while True:
            try:
                got = self._fill(file, offset, memory)
                if got >= needed:
                    return
                raise ReadError(
                    f"{self._paths[file]}: ends {needed - got} bytes early at offset "
                    f"{offset + got}; it was cut short, fetch it again"
                )
            except OSError as error:
                # The descriptor may be what is broken; the next attempt opens the file anew.
                self._close(file)
                if attempt == ATTEMPTS:
                    raise ReadError(
                        f"{self._paths[file]}: reading {needed} bytes at offset {offset} failed "
                        f"{ATTEMPTS} times ({error.strerror})"
                    ) from None
                time.sleep(RETRY_S * attempt)
                attempt += 1

    def _fill(self, file: int, offset: int, memory: memoryview) -> int:
        got = 0
        while got < len(memory):
            count = self._read_some(file, memory[got:], offset + got)
            got += count
            # O_DIRECT goes on at block boundaries only, and a partial block is the file's end.
            if count == 0 or (self.direct and count % BLOCK):
                break
        if not self.direct:
            advice = os.POSIX_FADV_DONTNEED
            os.posix_fadvise(self._open(file), offset, len(memory), advice)
        return got

    def _read_some(self, file: int, memory: memoryview, offset: int) -> int:
        try:
            return self._preadv(self._open(file), [memory], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
        # The shards may lie on several file systems, and this one refuses: buffered from here on.
        self.direct = False
        for number in list(self._descriptors):
            self._close(number)
        return self._preadv(self._open(file), [memory], offset)

    def _open(self, file: int) -> int:
        if file not in self._descriptors:
            flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
            self._descriptors[file] = os.open(self._paths[file], flags)
        return self._descriptors[file]

    def _close(self, file: int) -> None:
        descriptor = self._descriptors.pop(file, None)
        if descriptor is not None:
            os.close(descriptor)


def takes_direct(path: str, preadv: Preadv = os.preadv) -> bool:
    """Whether a block of `path` can be read by O_DIRECT: some file systems take the flag only."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, BLOCK) as block, memoryview(block) as memory:
            preadv(descriptor, [memory], 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
