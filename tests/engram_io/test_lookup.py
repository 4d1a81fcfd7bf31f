"""Token ids to row bytes on the mini checkpoint, without a process around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import safe_open

from engram_io.local import LocalEngramSource
from engram_io.lookup import EngramLookup
from engram_io.reader import ReadBlocks
from engram_io.token_map import TokenMap
from protocol import counters
from protocol.config import ModelConfig
from protocol.errors import CheckpointError, UsageError
from protocol.shards import Shards, TensorEntry

DATA = Path(__file__).parents[1] / "golden" / "data"
MINI = DATA / "mini"
CASES = sorted((DATA / "mini_cases").glob("*.safetensors"))
Int64 = npt.NDArray[np.int64]


@pytest.fixture
def source() -> Iterator[LocalEngramSource]:
    opened = LocalEngramSource.open(MINI)
    yield opened
    opened.lookup.close()


def tables_of(lookup: EngramLookup) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Every layer's codes and scales, read the plain way."""

    def whole(entry: TensorEntry) -> npt.NDArray[np.uint8]:
        raw = np.fromfile(entry.path, np.uint8, entry.nbytes, offset=entry.offset)
        return raw.reshape(entry.shape)

    return [(whole(table.codes), whole(table.scales)) for table in lookup.tables]


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_dequantized_rows_equal_the_reference(source: LocalEngramSource, case: Path) -> None:
    with safe_open(case, "pt") as tensors:
        prompt = tensors.get_tensor("prompt_ids").tolist()
        golden = [tensors.get_tensor(f"prefill.layers.{i}.engram_rows") for i in (1, 3)]
    ticket = source.request(0, prompt, [])
    for index in range(2):
        codes, scales = source.rows(ticket, index)
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
        factors = torch.exp2(torch.from_numpy(scales).float() - 127)
        rows = values * factors.repeat_interleave(32, -1)
        assert torch.equal(rows.bfloat16(), golden[index].reshape(rows.shape))
    source.done(ticket)


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_a_conversation_in_chunks_gets_the_rows_of_the_whole(
    source: LocalEngramSource, chunk: int
) -> None:
    tokens = np.random.default_rng(chunk).integers(3, 500, 31).tolist()
    whole = [source.rows(source.request(0, tokens, []), index) for index in range(2)]
    for begin in range(0, len(tokens), chunk):
        history = tokens[max(0, begin - 3) : begin]
        ticket = source.request(begin, tokens[begin : begin + chunk], history)
        for index in range(2):
            for part, all_of_it in zip(source.rows(ticket, index), whole[index], strict=True):
                np.testing.assert_array_equal(part, all_of_it[begin : begin + chunk])


@pytest.mark.parametrize(
    ("start", "tokens", "history", "said"),
    [
        (2, [5], [], "0 tokens of history, expected 2"),
        (5, [5], [1, 2], "2 tokens of history, expected 3"),
        (0, [5], [1], "1 tokens of history, expected 0"),
        (-1, [5], [], "expected 0"),
        (0, [512], [], "512 is outside the vocabulary"),
        (1, [5], [-3], "-3 is outside the vocabulary"),
    ],
)
def test_history_or_ids_that_would_hash_to_other_rows_are_refused(
    source: LocalEngramSource, start: int, tokens: list[int], history: list[int], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        source.request(start, tokens, history)


class Counting:
    """Counts reads and the bytes that were asked of the disk."""

    def __init__(self) -> None:
        self.reads = self.calls = 0

    def wrap(self, read: ReadBlocks) -> ReadBlocks:
        def counted(file: Int64, offset: Int64, length: Int64, at: Int64) -> Int64:
            self.calls += 1
            self.reads += len(file)
            return read(file, offset, length, at)

        return counted


def open_lookup(cache_bytes: int, counting: Counting) -> EngramLookup:
    config = ModelConfig.load(MINI)
    return EngramLookup(
        config,
        Shards.open(MINI, config),
        TokenMap.load(MINI, config),
        cache_bytes=cache_bytes,
        wrap_reads=counting.wrap,
    )


def test_rows_asked_for_again_come_from_memory_and_are_the_same() -> None:
    counting = Counting()
    lookup = open_lookup(1 << 20, counting)
    source = LocalEngramSource(lookup)
    tokens = [3, 4, 5, 6] * 50
    first = source.rows(source.request(0, tokens, []), 0)
    reads = counting.reads
    again = source.rows(source.request(0, tokens, []), 0)
    assert counting.reads == reads
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert lookup.counts[counters.ENGRAM_CACHE_HITS] == 200 * 6
    assert lookup.counts[counters.ENGRAM_ROWS] == 2 * 200 * 6


def test_a_row_asked_for_many_times_is_read_once() -> None:
    counting = Counting()
    lookup = open_lookup(0, counting)
    source = LocalEngramSource(lookup)
    tokens = [7] * 500
    codes, _ = source.rows(source.request(0, tokens, []), 1)
    # Positions 0, 1 and 2 see padding; from 3 on all 500 ask for the same six rows.
    assert lookup.counts[counters.ENGRAM_ROWS_READ] <= 4 * 6
    assert lookup.counts[counters.ENGRAM_CACHE_HITS] == 0
    assert (codes[3:] == codes[3]).all()


@pytest.mark.parametrize("cache_bytes", [0, 3000, 1 << 20])
def test_rows_do_not_depend_on_what_is_cached(cache_bytes: int) -> None:
    lookup = open_lookup(cache_bytes, Counting())
    source = LocalEngramSource(lookup)
    tables = tables_of(lookup)
    rng = np.random.default_rng(3)
    for count in (1, 1, 40, 1, 7, 300, 1, 40):
        tokens = rng.integers(3, 500, count).tolist()
        ticket = source.request(0, tokens, [])
        wanted = lookup.rows_of(0, tokens, [])
        for index, (codes, scales) in enumerate(tables):
            got_codes, got_scales = source.rows(ticket, index)
            np.testing.assert_array_equal(got_codes, codes[wanted[index]])
            np.testing.assert_array_equal(got_scales, scales[wanted[index]])
    assert lookup.cache.nbytes <= cache_bytes


def test_a_48000_token_prompt_takes_seconds_and_few_reads() -> None:
    """One read after the other, and a Python loop over 2 x 288,000 rows, would take minutes."""
    counting = Counting()
    lookup = open_lookup(1 << 20, counting)
    source = LocalEngramSource(lookup)
    tokens = np.random.default_rng(0).integers(3, 500, 48_000).tolist()
    begin = time.monotonic()
    ticket = source.request(0, tokens, [])
    for index in range(2):
        source.rows(ticket, index)
    assert time.monotonic() - begin < 10
    assert counting.calls < 20
    assert lookup.counts[counters.ENGRAM_ROWS] == 48_000 * 12


def test_tables_that_do_not_fit_the_config_are_refused() -> None:
    config = ModelConfig.load(MINI)
    shards, token_map = Shards.open(MINI, config), TokenMap.load(MINI, config)
    wrong = replace(config, engram_vocab_size=config.engram_vocab_size + 50)
    with pytest.raises(CheckpointError, match="engram_num_embeddings states"):
        EngramLookup(wrong, shards, token_map)


def test_a_ticket_is_forgotten_when_done_even_twice(source: LocalEngramSource) -> None:
    ticket = source.request(0, [5], [])
    source.done(ticket)
    source.done(ticket)
    assert source.request(0, [5], []) != ticket
