"""The state of a sequence: growth, snapshots, and continuing from one."""

from __future__ import annotations

import torch

from compute.sequence import GrowingRows, SequenceState
from tests.golden.cases import case
from tests.golden.harness import Mini, config

CPU = torch.device("cpu")


def test_growing_rows_keep_every_row_over_many_appends() -> None:
    rows, parts = GrowingRows(4, CPU), []
    for n in (0, 1, 2, 60, 1, 500, 3):
        part = torch.randn(n, 4).to(torch.bfloat16)
        parts.append(part)
        rows.append(part)
        assert len(rows) == sum(map(len, parts))
        assert torch.equal(rows.rows, torch.cat(parts))


def test_appending_copies_old_rows_a_bounded_number_of_times() -> None:
    rows, moves, where = GrowingRows(8, CPU), 0, 0
    for _ in range(5000):
        rows.append(torch.zeros(1, 8, dtype=torch.bfloat16))
        moves += rows.rows.data_ptr() != where
        where = rows.rows.data_ptr()
    assert moves <= 8


def test_a_restored_state_continues_bit_for_bit_after_other_tokens_were_tried() -> None:
    tokens = case("mini_len037")["prompt_ids"].tolist()
    mini = Mini(reference_index_keys=False)
    state = mini.model.new_state()
    # 21 tokens: past the window's wrap, and a group of two is half full.
    mini.run(tokens, state, 0, 21, every=False)
    kept = state.snapshot()
    expected = [mini.run(tokens, state, at, at + 1, every=False) for at in range(21, 30)]

    state.restore(kept)
    other = [*tokens[:21], *tokens[5:20]]
    mini.run(other, state, 21, 36, every=False)
    state.restore(kept)
    again = [mini.run(tokens, state, at, at + 1, every=False) for at in range(21, 30)]
    assert torch.equal(torch.stack(again), torch.stack(expected))

    fresh = SequenceState(config(), CPU)
    fresh.restore(kept)
    elsewhere = [mini.run(tokens, fresh, at, at + 1, every=False) for at in range(21, 30)]
    assert torch.equal(torch.stack(elsewhere), torch.stack(expected))


def test_a_snapshot_is_plain_tensors_and_ints_of_the_stated_size() -> None:
    tokens = case("mini_len037")["prompt_ids"].tolist()
    mini = Mini()
    state = mini.model.new_state()
    mini.run(tokens, state, 0, 37, every=False)
    kept = state.snapshot()
    assert kept["length"] == 37
    tensors = [part for part in kept.values() if isinstance(part, torch.Tensor)]
    assert all(isinstance(part, (torch.Tensor, int)) for part in kept.values())
    assert sum(part.nbytes for part in tensors) == state.nbytes
    shapes = {k: tuple(v.shape) for k, v in kept.items() if isinstance(v, torch.Tensor)}
    assert shapes["compressed.2"] == (18, 64) and shapes["index_keys.5"] == (37, 32)
    assert shapes["pending_kv.2"] == (1, 64) and shapes["pending_kv.5"] == (0, 64)
