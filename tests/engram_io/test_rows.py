"""Where rows lie, and the reads that cover them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engram_io.rows import ALIGNMENT, MERGE_GAP, MERGE_SPAN, EngramTable, locate_tables, plan_reads
from protocol.config import ModelConfig
from protocol.errors import ReadError
from protocol.shards import Shards, TensorEntry

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"


@pytest.mark.parametrize("count", [1, 2, 50, 5000])
@pytest.mark.parametrize(("width", "base"), [(256, 1003), (8, 77), (32, 4096)])
def test_every_piece_is_covered_by_aligned_reads(count: int, width: int, base: int) -> None:
    rows = np.unique(np.random.default_rng(count).integers(0, 400_000, count))
    begin = base + rows * width
    plan = plan_reads(begin, width)
    assert (plan.offset % ALIGNMENT == 0).all()
    assert (plan.length % ALIGNMENT == 0).all()
    assert (plan.length <= MERGE_SPAN + ALIGNMENT * 2).all()
    np.testing.assert_array_equal(plan.offset[plan.read] + plan.at, begin)
    assert (plan.at + width <= plan.needed[plan.read]).all()
    assert (plan.needed <= plan.length).all()
    assert (np.diff(plan.offset) > 0).all()


def test_neighbours_share_a_read_and_distant_rows_do_not() -> None:
    begin = np.array([0, 256, 5000, 5000 + ALIGNMENT + MERGE_GAP, 10 * MERGE_SPAN])
    plan = plan_reads(begin, 256)
    assert plan.read.tolist() == [0, 0, 0, 0, 1]
    apart = plan_reads(np.array([0, 2 * ALIGNMENT + MERGE_GAP]), 256)
    assert apart.read.tolist() == [0, 1]


def test_a_dense_run_is_cut_so_that_many_can_read_it() -> None:
    plan = plan_reads(np.arange(0, 1 << 20, 256), 256)
    assert len(plan.offset) == (1 << 20) // MERGE_SPAN


def test_no_pieces_need_no_reads() -> None:
    plan = plan_reads(np.zeros(0, np.int64), 256)
    assert len(plan.offset) == len(plan.read) == 0


def test_tables_are_located_by_the_shard_headers() -> None:
    config = ModelConfig.load(MINI)
    shards = Shards.open(MINI, config)
    tables = locate_tables(shards, config)
    assert [table.layer for table in tables] == [1, 3]
    assert [table.rows for table in tables] == list(config.engram_num_embeddings)
    for table in tables:
        assert table.codes == shards.tensors[f"layers.{table.layer}.engram.embed.weight"]
        assert table.scales == shards.tensors[f"layers.{table.layer}.engram.embed.scale"]


@pytest.mark.parametrize("row", [-1, 100, 1 << 40])
def test_a_row_beyond_the_table_is_refused_with_its_size(row: int) -> None:
    entry = TensorEntry("layers.1.engram.embed.weight", Path("s"), "F8_E4M3", (100, 32), 0, 3200)
    table = EngramTable(1, entry, entry)
    table.check(np.array([0, 99]))
    with pytest.raises(ReadError, match=f"embed.weight has 100 rows, row {row} was asked for"):
        table.check(np.sort(np.array([5, row])))
