"""Shared memory is taken for what it is or refused."""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from protocol.errors import HeadraceError, ResourceError
from protocol.layouts import (
    ABSENT,
    MAGIC,
    PAGE,
    Arena,
    Directory,
    EngramRing,
    Progress,
    SharedRegion,
    align_up,
    entry_slot,
    pack_entry,
)

REGIONS: list[tuple[type[SharedRegion], dict[str, int]]] = [
    (Arena, {"slots": 5, "slot_bytes": 3 * PAGE, "pieces": 2}),
    (Directory, {"layers": 3, "experts": 7, "slots": 5}),
    (Progress, {"words_count": Progress.COUNT}),
    (EngramRing, {"blocks": 2, "layers": 2, "block_tokens": 3, "rows": 6, "head_dim": 64}),
]
NAMES = [kind.__name__ for kind, _ in REGIONS]
every_region = pytest.mark.parametrize("kind, geometry", REGIONS, ids=NAMES)


@pytest.fixture
def region(request: pytest.FixtureRequest) -> Iterator[Callable[..., SharedRegion]]:
    made: list[SharedRegion] = []

    def make(kind: type[SharedRegion], geometry: dict[str, int]) -> SharedRegion:
        made.append(kind.create(**geometry))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _arrays(region: SharedRegion) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(region).items() if isinstance(value, np.ndarray)}


@every_region
def test_what_one_side_writes_the_other_reads(
    region: Callable[..., SharedRegion], kind: type[SharedRegion], geometry: dict[str, int]
) -> None:
    ours = region(kind, geometry)
    theirs = kind.attach(os.dup(ours.fd))
    for number, (name, array) in enumerate(_arrays(ours).items(), 1):
        array[...] = number
        assert (_arrays(theirs)[name] == number).all()
    # No array reaches into another: every one still holds its own number.
    for number, array in enumerate(_arrays(theirs).values(), 1):
        assert (array == number).all()
    assert {name: getattr(theirs, name) for name in geometry} == geometry
    theirs.close()


@every_region
def test_a_new_region_is_zero_beyond_its_header(
    region: Callable[..., SharedRegion], kind: type[SharedRegion], geometry: dict[str, int]
) -> None:
    ours = region(kind, geometry)
    assert all((array == 0).all() for array in _arrays(ours).values())
    assert os.fstat(ours.fd).st_size == PAGE + align_up(ours.payload_bytes())
    # Every page is there already: a touch can no longer be a bus error.
    assert os.fstat(ours.fd).st_blocks * 512 >= ours.nbytes


HEADER = {
    "another program's memory": (0, b"NOTHEADR"),
    "another version": (8, struct.pack("<I", 99)),
    "another kind of region": (12, struct.pack("<I", 99)),
    "a geometry larger than the memory": (16, struct.pack("<q", 1 << 40)),
    "a negative geometry": (16, struct.pack("<q", -1)),
    "an empty geometry": (16, struct.pack("<q", 0)),
}


@every_region
@pytest.mark.parametrize("damage", HEADER, ids=str)
def test_a_wrong_header_is_refused(
    region: Callable[..., SharedRegion],
    kind: type[SharedRegion],
    geometry: dict[str, int],
    damage: str,
) -> None:
    ours = region(kind, geometry)
    offset, data = HEADER[damage]
    os.pwrite(ours.fd, data, offset)
    with pytest.raises(HeadraceError, match=f"shared memory of {kind.__name__}"):
        kind.attach(ours.fd)


@every_region
def test_memory_of_another_size_is_refused(
    region: Callable[..., SharedRegion], kind: type[SharedRegion], geometry: dict[str, int]
) -> None:
    ours = region(kind, geometry)
    copy = os.memfd_create("copy")
    for size in (0, 7, PAGE - 1, ours.nbytes - PAGE, ours.nbytes + PAGE):
        os.ftruncate(copy, 0)
        os.pwrite(copy, os.pread(ours.fd, min(size, PAGE), 0), 0)
        os.ftruncate(copy, size)
        with pytest.raises(HeadraceError, match=f"shared memory of {kind.__name__}"):
            kind.attach(copy)
    os.close(copy)


def test_one_region_is_not_taken_for_another(region: Callable[..., SharedRegion]) -> None:
    for kind, geometry in REGIONS:
        ours = region(kind, geometry)
        for other, _ in REGIONS:
            if other is not kind:
                with pytest.raises(HeadraceError, match="expected"):
                    other.attach(ours.fd)


def test_more_memory_than_the_system_gives_is_refused_with_the_number() -> None:
    before = set(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit of this process stands for the machine's: to exhaust that one would end others.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(ResourceError, match=f"{2 * PAGE + (2 << 20)} bytes"):
            Arena.create(slots=2, slot_bytes=1 << 20, pieces=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_view_outlives_the_region_and_nothing_outlives_the_view() -> None:
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    arena = Arena.create(slots=2, slot_bytes=PAGE, pieces=1)
    held = arena.data[1]
    arena.close()
    held[...] = 3
    assert (held == 3).all()
    del held, arena
    assert (set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before


def test_a_descriptor_is_not_inherited_unless_passed() -> None:
    arena = Arena.create(slots=1, slot_bytes=PAGE, pieces=1)
    assert not os.get_inheritable(arena.fd)
    arena.close()


@pytest.mark.parametrize("slot, generation", [(0, 0), (1, 0), (0, 1), (2**31, 5), (7, 2**30)])
def test_a_directory_word_gives_back_its_slot(slot: int, generation: int) -> None:
    word = pack_entry(slot, generation)
    assert entry_slot(word) == slot and word >> 32 == generation
    assert word != ABSENT and word < 1 << 63


def test_the_header_is_what_the_other_builds_expect() -> None:
    arena = Arena.create(slots=2, slot_bytes=PAGE, pieces=1)
    assert os.pread(arena.fd, 32, 0) == struct.pack("<8sIIqq", MAGIC, 3, 1, 2, PAGE)
    arena.close()
