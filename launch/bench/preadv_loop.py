"""The yardstick for reading: preadv in a loop, nothing else.

Run as `python -m launch.bench.preadv_loop`. Takes one JSON line on standard input, `{"direct":
bool, "files": [...], "reads": [[file, offset, length], ...]}`, answers `ready`, waits for a line,
reads everything, and prints the seconds it took.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time


def main() -> None:
    """The process's whole life."""
    work = json.loads(sys.stdin.readline())
    flags = os.O_RDONLY | (os.O_DIRECT if work["direct"] else 0)
    descriptors = [os.open(path, flags) for path in work["files"]]
    memory = memoryview(mmap.mmap(-1, max(length for _, _, length in work["reads"])))
    # Touched once, so that no page fault falls into the measured time.
    memory[:] = bytes(len(memory))
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    for file, offset, length in work["reads"]:
        got = 0
        while got < length:
            count = os.preadv(descriptors[file], [memory[got:length]], offset + got)
            if not count:
                break
            got += count
        if not work["direct"]:
            os.posix_fadvise(descriptors[file], offset, length, os.POSIX_FADV_DONTNEED)
    print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main()
