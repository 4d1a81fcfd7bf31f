"""Symptoms: a short read that passes for bytes, one bad read that ends a chat, a file system that
refuses O_DIRECT, a page cache that grows behind the arena."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from expert_io.disk import ATTEMPTS, ShardFiles
from expert_io.slices import BLOCK
from protocol.errors import ReadError
from tests.page_cache import cached_pages

SIZE = 5 * BLOCK + 700


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def memory() -> memoryview:
    """Page-aligned, as the arena is."""
    return memoryview(mmap.mmap(-1, 6 * BLOCK))


class Broken:
    """os.preadv that first does what `acts` say, one a call: an errno, or a cap on the bytes."""

    def __init__(self, *acts: Callable[[], int]) -> None:
        self.acts = list(acts)
        self.calls = 0

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls += 1
        if self.acts:
            most = self.acts.pop(0)()
            return os.preadv(descriptor, [buffers[0][:most]], offset) if most else 0
        return os.preadv(descriptor, buffers, offset)


def fails(number: int) -> Callable[[], int]:
    def fail() -> int:
        raise OSError(number, os.strerror(number))

    return fail


def gives(count: int) -> Callable[[], int]:
    return lambda: count


@pytest.mark.parametrize("direct", [True, False])
def test_a_range_and_the_end_of_a_file_come_as_they_are(
    shard: Path, memory: memoryview, direct: bool
) -> None:
    files = ShardFiles([str(shard)], direct)
    data = shard.read_bytes()
    files.read(0, BLOCK, 2 * BLOCK, memory[: 2 * BLOCK])
    assert memory[: 2 * BLOCK] == data[BLOCK : 3 * BLOCK]
    files.read(0, 4 * BLOCK, BLOCK + 700, memory[: 2 * BLOCK])
    assert memory[: BLOCK + 700] == data[4 * BLOCK :]


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_too_early_is_an_error_with_its_place(
    shard: Path, memory: memoryview, direct: bool
) -> None:
    files = ShardFiles([str(shard)], direct)
    with pytest.raises(ReadError, match=rf"{shard}: ends 1 bytes early at offset {SIZE}; it was"):
        files.read(0, 4 * BLOCK, BLOCK + 701, memory[: 2 * BLOCK])
    with pytest.raises(ReadError, match=rf"ends {BLOCK} bytes early at offset {100 * BLOCK}"):
        files.read(0, 100 * BLOCK, BLOCK, memory[:BLOCK])


def test_short_reads_go_on_where_they_stopped(shard: Path, memory: memoryview) -> None:
    preadv = Broken(gives(1), gives(2 * BLOCK), gives(77))
    files = ShardFiles([str(shard)], False, preadv)
    files.read(0, 0, SIZE, memory)
    assert memory[:SIZE] == shard.read_bytes() and preadv.calls >= 4


def test_short_direct_reads_go_on_at_block_boundaries(
    shard: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever file system the tests run on, this one takes the flag.
    really = os.open
    monkeypatch.setattr("os.open", lambda path, flags: really(path, flags & ~os.O_DIRECT))
    preadv = Broken(gives(BLOCK), gives(BLOCK), gives(2 * BLOCK))
    files = ShardFiles([str(shard)], True, preadv)
    files.read(0, 0, SIZE, memory)
    assert files.direct and memory[:SIZE] == shard.read_bytes() and preadv.calls == 4


def test_an_error_that_passes_is_not_seen(
    shard: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    preadv = Broken(fails(errno.EIO), fails(errno.EIO))
    files = ShardFiles([str(shard)], False, preadv)
    before = set(os.listdir("/proc/self/fd"))
    files.read(0, 0, BLOCK, memory[:BLOCK])
    assert memory[:BLOCK] == shard.read_bytes()[:BLOCK] and preadv.calls == 3
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1, "each attempt's file is closed"


def test_an_error_that_stays_names_file_offset_and_reason(
    shard: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    preadv = Broken(*[fails(errno.EIO)] * 10)
    with pytest.raises(ReadError, match=rf"{shard}: reading 4096 bytes at offset 8192 failed 3"):
        ShardFiles([str(shard)], False, preadv).read(0, 2 * BLOCK, BLOCK, memory[:BLOCK])
    assert preadv.calls == ATTEMPTS and len(pauses) == ATTEMPTS - 1
    assert sum(pauses) < 1, "a request waits for this"


def test_a_shard_put_back_is_opened_anew(
    shard: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ShardFiles([str(shard)], False)
    data = shard.read_bytes()
    shard.unlink()

    def put_back(seconds: float) -> None:
        shard.write_bytes(data)

    monkeypatch.setattr("time.sleep", put_back)
    files.read(0, 0, BLOCK, memory[:BLOCK])
    assert memory[:BLOCK] == data[:BLOCK]


def test_a_missing_shard_is_an_error_with_its_name(
    shard: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    files = ShardFiles([str(shard), str(shard) + ".gone"], False)
    with pytest.raises(ReadError, match=r"\.gone: reading .* \(No such file or directory\)"):
        files.read(1, 0, BLOCK, memory[:BLOCK])


def test_a_file_system_that_takes_the_flag_and_refuses_the_read_is_read_buffered(
    shard: Path, memory: memoryview
) -> None:
    assert not ShardFiles([str(shard)], True, Broken(fails(errno.EINVAL))).direct, "probed"
    late = Broken(gives(BLOCK), fails(errno.EINVAL))
    files = ShardFiles([str(shard)], True, late)
    files.read(0, 0, SIZE, memory)
    assert not files.direct and memory[:SIZE] == shard.read_bytes()


def test_a_file_system_that_refuses_the_flag_is_read_buffered(
    shard: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found at the start for the first shard, later for one on another file system."""
    really = os.open
    refused = {str(shard)}

    def without_direct(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and path in refused:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(path, flags, *mode)

    monkeypatch.setattr("os.open", without_direct)
    assert not ShardFiles([str(shard)], True).direct
    other = shard.with_name("other")
    other.write_bytes(shard.read_bytes())
    files = ShardFiles([str(other), str(shard)], True)
    files.read(1, 0, SIZE, memory)
    assert memory[:SIZE] == shard.read_bytes() and not files.direct
    files.read(0, 0, SIZE, memory)
    assert memory[:SIZE] == other.read_bytes()


def test_nothing_a_buffered_read_brought_stays_in_the_page_cache(
    shard: Path, memory: memoryview
) -> None:
    with shard.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = cached_pages(shard)
        ShardFiles([str(shard)], False).read(0, 0, SIZE, memory)
        assert cached_pages(shard) <= before


def test_no_shard_is_ever_mapped() -> None:
    """A page fault a page costs a tenth of the disk's speed: mmap is for memory alone."""
    package = Path(__file__).parents[2] / "expert_io"
    sources = {path.name: path.read_text() for path in package.glob("*.py")}
    assert {n: s.count("mmap.mmap(") for n, s in sources.items() if "mmap.mmap(" in s} == {
        "disk.py": 1
    }
    assert "mmap.mmap(-1," in sources["disk.py"]
    assert not any("import torch" in source for source in sources.values())
