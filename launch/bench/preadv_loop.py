"""The yardstick for reading: preadv in a loop, nothing else.

Run as `python -m launch.bench.preadv_loop`. Takes one JSON line on standard input, `{"direct":
bool, "files": [...], "reads": [[file, offset, length], ...], "memory": bytes, "huge_pages": bool}`,
answers `ready`, waits for a line, reads everything, and prints the seconds it took.
"""

from __future__ import annotations

import json
import os
import sys
import time

from protocol.huge_pages import private_memory


def main() -> None:
    """The process's whole life."""
    work = json.loads(sys.stdin.readline())
    flags = os.O_RDONLY | (os.O_DIRECT if work["direct"] else 0)
    descriptors = [os.open(path, flags) for path in work["files"]]
    # A reader's share of the arena: a small buffer would stay in the processor's cache.
    memory = memoryview(private_memory(work["memory"], huge=work["huge_pages"]))
    # Touched once, so that no page fault falls into the measured time.
    memory[:] = bytes(len(memory))
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    place = 0
    for file, offset, length in work["reads"]:
        if place + length > len(memory):
            place = 0
        into, got = memory[place : place + length], 0
        place += length
        while got < length:
            count = os.preadv(descriptors[file], [into[got:]], offset + got)
            if not count:
                break
            got += count
        if not work["direct"]:
            os.posix_fadvise(descriptors[file], offset, length, os.POSIX_FADV_DONTNEED)
    print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main()
