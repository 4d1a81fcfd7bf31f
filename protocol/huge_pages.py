"""Huge pages under a memfd, where the kernel gives them.

Owns the one way to get them that needs no administrator: MADV_COLLAPSE (Linux 6.1 and later), which
does not heed the settings of transparent huge pages. A disk is asked for as much at once as lies
together in memory, and reads into scattered pages are cut into small requests; besides, huge pages
are zeroed and mapped sooner.

Promises: contents stay, nothing is left mapped, and what the kernel refuses stays in small pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25
MAP_FIXED = 0x10
# Collapsed by one call. A refusal ends the rest, too: memory is then scattered.
STRETCH = 256 << 20


def use_huge_pages(fd: int, size: int) -> int:
    """Put the whole huge pages among the first `size` bytes of memfd `fd` into such; how many bytes
    are now. Raises OSError where memory does not suffice for them at all."""
    whole = size // HUGE_PAGE * HUGE_PAGE
    if whole == 0:
        return 0
    libc = _libc()
    # A huge page needs an address that is a multiple of it: reserve addresses with room to choose
    # one, and map the memfd over them from there.
    room = whole + HUGE_PAGE
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = libc.mmap(None, room, 0, nothing, -1, 0)
    if reserved == ctypes.c_void_p(-1).value:
        return 0
    start = -(-reserved // HUGE_PAGE) * HUGE_PAGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        if libc.mmap(start, whole, access, mmap.MAP_SHARED | MAP_FIXED, fd, 0) != start:
            return 0
        for done in range(0, whole, STRETCH):
            stretch = min(STRETCH, whole - done)
            _touch(fd, done, stretch)
            if libc.madvise(start + done, stretch, MADV_COLLAPSE):
                return done
        return whole
    finally:
        libc.munmap(reserved, room)


def private_memory(size: int, *, huge: bool = True) -> mmap.mmap:
    """`size` bytes of this process's own, in huge pages where the kernel gives them, or in none."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel built without them refuses either.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return memory


def _touch(fd: int, start: int, size: int) -> None:
    """Have one small page where each huge one is to be: the kernel collapses no hole, and what is
    filled already would have to be copied."""
    for offset in range(start, start + size, HUGE_PAGE):
        os.pwrite(fd, os.pread(fd, 1, offset), offset)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.mmap.restype = address
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    return libc
