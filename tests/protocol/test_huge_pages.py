"""Huge pages: what was in the memory stays, and a kernel that refuses changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from protocol import huge_pages
from protocol.huge_pages import HUGE_PAGE, use_huge_pages

SIZE = 3 * HUGE_PAGE + 4096


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def _fill(fd: int) -> bytes:
    contents = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
    assert os.pwrite(fd, contents, 0) == SIZE
    return contents


def test_what_lies_in_the_memory_survives(memory: int) -> None:
    contents = _fill(memory)
    assert use_huge_pages(memory, SIZE) in (0, 3 * HUGE_PAGE)
    assert os.pread(memory, SIZE, 0) == contents


def test_fresh_memory_is_still_zero_and_as_large(memory: int) -> None:
    use_huge_pages(memory, SIZE)
    assert os.fstat(memory).st_size == SIZE
    assert os.pread(memory, SIZE, 0) == bytes(SIZE)


def test_nothing_stays_mapped(memory: int) -> None:
    use_huge_pages(memory, SIZE)
    assert "memfd:test" not in Path("/proc/self/maps").read_text()


def test_a_kernel_that_refuses_leaves_small_pages(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "MADV_COLLAPSE", 9999)
    contents = _fill(memory)
    assert use_huge_pages(memory, SIZE) == 0
    assert os.pread(memory, SIZE, 0) == contents


def test_less_than_a_huge_page_is_left_alone(memory: int) -> None:
    assert use_huge_pages(memory, HUGE_PAGE - 1) == 0
