"""A prompt cut into chunks of any size gives the same attention memory and the same answer."""

from __future__ import annotations

import pytest
import torch

from compute.sequence import SequenceState
from tests.golden.cases import case
from tests.golden.harness import Mini, config, relative

CHUNKS = (1, 3, 7)


def cut(length: int, size: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + size, length)) for begin in range(0, length, size)]


def through_attention(name: str, size: int) -> tuple[torch.Tensor, SequenceState]:
    """Attention outputs of all layers, each fed with its golden inputs in chunks of `size`."""
    golden, model = case(name), Mini(reference_index_keys=False).model
    state, outputs = model.new_state(), []
    with torch.inference_mode():
        for begin, end in cut(len(golden["prompt_ids"]), size):
            chunk = model.chunk(begin, end - begin)
            for layer in range(config().num_hidden_layers):
                x = golden[f"prefill.layers.{layer}.attn_in"][begin:end]
                outputs.append((layer, begin, model.attention(layer, x, chunk, state)))
            state.length = end
    ordered = sorted(outputs, key=lambda item: item[:2])
    return torch.cat([output for _, _, output in ordered]), state


@pytest.mark.parametrize("name", ["mini_len017", "mini_len100"])
@pytest.mark.parametrize("size", CHUNKS)
def test_a_chunk_boundary_shows_in_window_compressed_rows_or_index_keys(
    name: str, size: int
) -> None:
    whole, expected = through_attention(name, 1 << 20)
    pieces, state = through_attention(name, size)
    held, wanted = state.snapshot(), expected.snapshot()
    assert held.keys() == wanted.keys()
    for part, want in wanted.items():
        got = held[part]
        if isinstance(want, torch.Tensor):
            assert isinstance(got, torch.Tensor) and got.shape == want.shape, part
            # Sums over another number of rows may differ in their last bit, rarely a rounded one.
            different = (got.float() - want.float()).abs() > 1e-5
            assert int(different.sum()) <= want.numel() / 1000, part
        else:
            assert got == want, part
    assert float((pieces != whole).float().mean()) <= 1e-3
    assert relative(pieces, whole) <= 5e-4


def last_logits(name: str, size: int) -> torch.Tensor:
    """Logits after every token, the prompt run in chunks of `size`."""
    tokens = case(name)["prompt_ids"].tolist()
    mini = Mini(reference_index_keys=False)
    state = mini.model.new_state()
    parts = [mini.run(tokens, state, *ends, every=True) for ends in cut(len(tokens), size)]
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["mini_len017", "mini_len100"])
@pytest.mark.parametrize("size", CHUNKS)
def test_the_answer_depends_on_how_the_prompt_was_cut(name: str, size: int) -> None:
    whole, pieces = last_logits(name, 1 << 20), last_logits(name, size)
    assert relative(pieces, whole) <= 0.10
    best = whole.topk(2, -1)
    clear = best.values[:, 0] - best.values[:, 1] > 0.4
    assert torch.equal(pieces.argmax(-1)[clear], best.indices[clear, 0])
    assert relative(pieces[-1], case(name)["prefill.logits"]) <= 0.12
