"""Rows from disk bit for bit, by every way of reading, and disks that fail."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engram_io import block_reader
from engram_io.block_reader import BlockReader
from engram_io.kernel_aio import AioQueue
from engram_io.reader import ATTEMPTS, RowReader, WantedRows
from engram_io.rows import MERGE_SPAN
from protocol.errors import CheckpointError, ReadError, StallError
from tests.engram_io.table_on_disk import ROWS, TableOnDisk
from tests.page_cache import cached_pages

Int64 = npt.NDArray[np.int64]
WAYS = ("kernel AIO", "direct threads", "buffered threads")


class Disk:
    """A reader over the table, and what it was asked to do."""

    def __init__(self, on_disk: TableOnDisk, blocks: BlockReader) -> None:
        self.on_disk = on_disk
        self.blocks = blocks
        self.reads = 0
        self.results: dict[int, int] = {}  # spoils the read with this number, counted from 0
        self.rounds: list[int] = []
        self.reader = RowReader(blocks, self._heard, self._read)

    def _heard(self, layers: Sequence[int], count: int, nbytes: int, begin: int, end: int) -> None:
        assert list(layers) == [self.on_disk.table.layer]
        assert nbytes > 0 and end >= begin
        self.rounds.append(count)

    def _read(self, file: Int64, offset: Int64, length: Int64, at: Int64) -> Int64:
        results = self.blocks.read(file, offset, length, at)
        for index in range(len(results)):
            results[index] = self.results.get(self.reads + index, results[index])
        self.reads += len(results)
        return results

    def rows(self, rows: Int64) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        codes = np.zeros((len(rows), 256), np.uint8)
        scales = np.zeros((len(rows), 8), np.uint8)
        self.reader.read([WantedRows(self.on_disk.table, rows, codes, scales)])
        return codes, scales

    def check(self, rows: Int64) -> None:
        codes, scales = self.rows(rows)
        np.testing.assert_array_equal(codes, self.on_disk.codes[rows])
        np.testing.assert_array_equal(scales, self.on_disk.scales[rows])


@pytest.fixture(params=WAYS)
def disk(
    request: pytest.FixtureRequest, on_disk: TableOnDisk, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Disk]:
    if request.param == "direct threads":
        monkeypatch.setattr(block_reader, "AioQueue", _refused)
    direct = request.param != "buffered threads"
    blocks = BlockReader(
        [on_disk.path], 32, direct=direct, stall_s=0.3, staging_bytes=2 * MERGE_SPAN
    )
    yield Disk(on_disk, blocks)
    blocks.close()


def _refused(_depth: int) -> AioQueue:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_rows_are_bit_exact_wherever_they_lie(disk: Disk) -> None:
    rng = np.random.default_rng(1)
    disk.check(np.array([0]))
    disk.check(np.array([ROWS - 1]))  # ends the file, inside its last block
    disk.check(np.array([0, 1, 2, 15, 16, 17, ROWS - 2, ROWS - 1]))
    for count in (24, 300, 3000):
        disk.check(np.unique(rng.integers(0, ROWS, count)))
    disk.check(np.arange(0, ROWS, 3))
    assert max(disk.rounds) > 1 and len(disk.rounds) > 20  # several rounds, several reads each


def test_nothing_asked_reads_nothing(disk: Disk) -> None:
    disk.check(np.zeros(0, np.int64))
    assert disk.reads == 0


def test_a_row_beyond_the_table_is_an_error_before_any_read(disk: Disk) -> None:
    with pytest.raises(ReadError, match=f"has {ROWS} rows, row {ROWS} was asked for"):
        disk.rows(np.array([3, ROWS]))
    assert disk.reads == 0


def test_an_io_error_that_passes_is_read_again(disk: Disk) -> None:
    disk.results = {0: -errno.EIO}
    disk.check(np.array([5, 30_000]))
    assert disk.reads == 4 + 1


def test_an_io_error_that_stays_names_file_tensor_and_offset(disk: Disk) -> None:
    row = np.array([ROWS // 2])
    disk.results = {0: -errno.EIO, **{2 + again: -errno.EIO for again in range(ATTEMPTS)}}
    with pytest.raises(ReadError) as caught:
        disk.rows(row)
    offset = (1003 + ROWS // 2 * 256) // 4096 * 4096
    for part in (str(disk.on_disk.path), "layers.1.engram.embed.weight", f"offset {offset}"):
        assert part in str(caught.value)
    assert "Input/output error" in str(caught.value) and "\n" not in str(caught.value)
    disk.results = {}
    disk.check(row)


def test_a_short_read_is_not_a_success(disk: Disk) -> None:
    disk.results = dict.fromkeys(range(1, 20), 7)
    with pytest.raises(ReadError, match=r"embed\.scale.* 7 bytes came.*cut short"):
        disk.rows(np.array([12]))


def test_a_table_truncated_while_running_fails_only_what_is_gone(disk: Disk) -> None:
    path = disk.on_disk.path
    size = path.stat().st_size
    os.truncate(path, size - 8 * 1000)
    disk_rows = np.array([100, ROWS - 5])
    with pytest.raises(
        ReadError, match=r"embed\.scale: read of \d+ bytes at offset \d+.*cut short"
    ):
        disk.rows(disk_rows)
    disk.check(disk_rows[:1])


def test_a_scale_that_is_not_a_number_is_refused_with_its_row(disk: Disk) -> None:
    scales = disk.on_disk.table.scales
    with disk.on_disk.path.open("r+b") as file:
        file.seek(scales.offset + 8 * 777 + 3)
        file.write(b"\xff")
    with pytest.raises(ReadError, match=r"embed\.scale: row 777 .*not a number"):
        disk.rows(np.array([3, 777]))


def test_a_disk_that_stops_answering_is_an_error_within_the_bound(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards the reads that were in flight are waited for, so none lands in another's rows."""
    release = threading.Event()
    really_collect, really_preadv = AioQueue.collect, os.preadv

    def collect(queue: AioQueue, least: int, timeout: float) -> tuple[Int64, Int64]:
        if release.is_set():
            return really_collect(queue, least, timeout)
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        release.wait(10)
        return really_preadv(fd, buffers, offset)

    monkeypatch.setattr(AioQueue, "collect", collect)
    monkeypatch.setattr(os, "preadv", preadv)
    for _ in range(2):
        with pytest.raises(StallError, match=r"engram rows: \d+ reads without an answer .*0\.3 s"):
            disk.rows(np.array([5, 30_000]))
    release.set()
    disk.check(np.array([6, 20_000]))


def test_a_refused_submit_is_that_reads_error(disk: Disk, on_disk: TableOnDisk) -> None:
    bad = BlockReader([on_disk.path], 4)
    offset = np.array([1, 0])
    results = bad.read(np.zeros(2, np.int64), offset, np.array([4096, 4096]), np.array([0, 4096]))
    assert results.tolist() == [-errno.EINVAL, 4096]
    bad.close()


def test_a_file_system_without_o_direct_is_read_buffered(
    on_disk: TableOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse_direct(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags)

    monkeypatch.setattr(os, "open", refuse_direct)
    blocks = BlockReader([on_disk.path], 8)
    assert "buffered" in blocks.way and "O_DIRECT" in blocks.way
    Disk(on_disk, blocks).check(np.array([1, 2, 39_000]))
    blocks.close()


def test_a_missing_shard_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: cannot be opened"):
        BlockReader([tmp_path / "gone.safetensors"], 8)


def test_reading_rows_leaves_no_pages_in_the_page_cache(disk: Disk) -> None:
    path = disk.on_disk.path
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    before = cached_pages(path)
    disk.check(np.arange(0, ROWS, 400))
    assert cached_pages(path) <= before


def test_no_table_is_ever_mapped(disk: Disk) -> None:
    disk.check(np.arange(0, ROWS, 400))
    assert str(disk.on_disk.path) not in Path("/proc/self/maps").read_text()
