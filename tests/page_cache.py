"""What of a file the kernel holds in memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np


def cached_pages(path: Path) -> int:
    """Pages of `path` in the page cache. Only asks: a read would fetch what it looks for."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        failed = mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(len(mapped)),
            ctypes.c_void_p(pages.ctypes.data),
        )
        assert not failed, os.strerror(ctypes.get_errno())
        del view
    return int((pages & 1).sum())
