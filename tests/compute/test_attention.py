"""Window slots, the softmax with its sink, and the choice of compressed rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from compute.layers import attention, indexer
from compute.layers.attention import sparse_attention, window_slots
from tests.golden.cases import DATA, unit
from tests.golden.harness import relative

UNITS: dict[str, Any] = json.loads((DATA / "units" / "manifest.json").read_text())["units"]
CANDIDATES = UNITS["candidate_blocks"]["params"]


@pytest.mark.parametrize("index", range(3))
def test_probabilities_round_relative_to_the_running_maximum(index: int) -> None:
    golden = {
        name.removeprefix(f"{index}."): tensor
        for name, tensor in unit("sparse_attn").items()
        if name.startswith(f"{index}.")
    }
    slots = golden["idx"][0].long()
    got = sparse_attention(golden["q"][0], golden["sink"].float(), golden["kv"][0], slots)
    assert float((got != golden["out"][0]).float().mean()) <= 1e-3
    assert relative(got, golden["out"][0]) <= 1e-5
    assert relative(got, golden["exact"][0]) <= 4e-3
    empty = (slots < 0).all(-1)
    assert torch.equal(got[empty], torch.zeros_like(got[empty]))


def test_pieces_of_queries_and_split_storage_give_the_same_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    golden = unit("sparse_attn")
    queries, kv, sink = golden["0.q"][0], golden["0.kv"][0], golden["0.sink"].float()
    slots = golden["0.idx"][0].long()
    whole = sparse_attention(queries, sink, kv, slots)
    monkeypatch.setattr(attention, "GATHER_ELEMENTS", 2 * slots.shape[1] * kv.shape[1])
    assert torch.equal(sparse_attention(queries, sink, kv, slots), whole)
    near, far = slots[:, :30], slots[:, 30:]
    shifted = torch.where(far < 0, far, far + 5)
    rows = torch.cat((torch.ones(5, kv.shape[1], dtype=kv.dtype), kv))
    assert torch.equal(sparse_attention(queries, sink, kv, near, rows, shifted), whole)


@pytest.mark.parametrize("width", [12, 16])
def test_window_slots_of_a_whole_prompt_equal_the_reference(width: int) -> None:
    for name, want in unit("window_slots").items():
        kind, phase, number = name.split(".")
        if kind != f"w{width}" or phase != "prefill":
            continue
        got = window_slots(torch.arange(int(number)), width, 0)
        # The reference cuts the width to the prompt's length; here it never depends on it.
        assert torch.equal(got[:, : want.shape[2]], want[0].long())
        assert bool((got[:, want.shape[2] :] == -1).all())


@pytest.mark.parametrize("width", [12, 16])
def test_window_slots_of_a_later_token_hold_the_same_positions(width: int) -> None:
    for name, want in unit("window_slots").items():
        kind, phase, number = name.split(".")
        if kind != f"w{width}" or phase != "decode":
            continue
        position = int(number)
        first = position - min(position, width - 1)
        slots = window_slots(torch.tensor([position]), width, first)[0]
        positions = (slots[slots >= 0] + first) % width
        assert positions.tolist() == [slot for slot in want.flatten().tolist() if slot >= 0]


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_candidate_blocks_equal_the_reference(phase: str, index: int) -> None:
    golden, of = unit("candidate_blocks"), CANDIDATES[index]
    scores, want = (golden[f"{phase}.{index}.{part}"][0] for part in ("logits", "mask"))
    rows = scores.shape[1]
    visible = torch.arange(1, rows + 1) if phase == "prefill" else torch.tensor([rows])
    blocks = indexer.candidate_blocks(scores, visible, of["block_size"], of["topk_blocks"])
    assert torch.equal(indexer.rows_of_blocks(blocks, of["block_size"], rows), want)


def test_a_tie_at_the_cut_goes_to_the_older_row_whatever_follows() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, -0.0, 0.0, 1.0, -1.0, -torch.inf]]).to(torch.bfloat16)
    assert indexer.choose_rows(scores, 3).tolist() == [[0, 1, 2]]
    assert indexer.choose_rows(scores, 5).tolist() == [[0, 1, 2, 3, 5]]
    assert indexer.choose_rows(scores, 8).tolist() == [[0, 1, 2, 3, 4, 5, 6, -1]]
    longer = torch.cat((scores, torch.ones(1, 9).to(torch.bfloat16)), 1)
    assert indexer.choose_rows(longer, 3).tolist() == [[0, 1, 2]]


def test_top_positions_order_every_bf16_number() -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[~numbers.isnan()]
    numbers = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(3))]
    order = indexer.top_positions(numbers.unsqueeze(0), len(numbers))[0]
    assert torch.equal(numbers[order], numbers.sort(descending=True).values)


def test_a_query_that_sees_no_row_keeps_no_block_and_chooses_none() -> None:
    scores = torch.full((2, 6), -torch.inf, dtype=torch.bfloat16)
    scores[1, :3] = 1
    visible = torch.tensor([0, 3])
    blocks = indexer.candidate_blocks(scores, visible, 2, 2)
    assert blocks.tolist() == [[False, False, False], [True, True, False]]
    assert indexer.choose_rows(scores, 4).tolist() == [[-1, -1, -1, -1], [0, 1, 2, -1]]
