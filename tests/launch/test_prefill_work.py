"""Symptoms: the floor that a prefill is held against counts other work than the model does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compute.model import Model
from compute.resident import ResidentExperts
from compute.weights import ModelWeights
from engram_io.local import LocalEngramSource
from launch.bench.group import TensorRows
from launch.bench.prefill_work import (
    ATTENTION,
    DENSE,
    EXPERTS,
    INDEX,
    Work,
    floor_seconds,
    layer_work,
    prefill_work,
    total,
)
from protocol.config import ModelConfig
from protocol.shards import Shards
from protocol.tensor_table import kind_of

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
CPU = torch.device("cpu")
# Past the window of 16 and past 8 chosen rows at both ratios.
TOKENS = 24


@cache
def config() -> ModelConfig:
    return ModelConfig.load(MINI)


def everything(tokens: int, of: ModelConfig | None = None) -> Work:
    of = of or config()
    distinct = [of.n_routed_experts] * of.num_hidden_layers
    return total(total(parts.values()) for parts in prefill_work(of, tokens, distinct))


def products_of_torch(of: ModelConfig) -> int:
    """Operations of all matrix products that torch makes for TOKENS tokens, apart from those whose
    result is masked."""
    shards = Shards.open(MINI, of)
    rows = TensorRows(LocalEngramSource.open(MINI))
    masked = [0]

    def observe(name: str, layer: int, tensor: torch.Tensor) -> None:
        if name == "index_score":
            hidden = int((tensor == -torch.inf).sum())
            masked[0] += 2 * of.index_n_heads * of.index_head_dim * hidden
        if name == "topk_idxs":
            readers = sum(
                of.compress_ratios[at] > 0
                and max(source for source in of.index_source_layer_ids if source <= at) == layer
                for at in range(layer, of.num_hidden_layers)
            )
            masked[0] += readers * a_slot * int((tensor == -1).sum())

    a_slot = 4 * of.num_attention_heads * of.head_dim
    empty = sum(max(of.sliding_window - (at + 1), 0) for at in range(TOKENS))
    masked[0] += of.num_hidden_layers * a_slot * empty
    weights = ModelWeights.load(shards, CPU)
    source = ResidentExperts.read(shards, CPU)
    model = Model(of, weights, source, rows, predictions=0, observe=observe)
    tokens = [3 + 7 * at for at in range(TOKENS)]
    with FlopCounterMode(display=False) as counter:
        model.forward(tokens, model.new_state(), rows.request(0, tokens, []))
    # Sinkhorn's sums over rows and columns are written as products with ones.
    sums = counter.get_flop_counts()["Global"][torch.ops.aten.baddbmm]
    counted: int = counter.get_total_flops()
    return counted - sums - masked[0]


def test_operations_are_those_of_the_products_that_torch_makes() -> None:
    # All blocks are candidates: torch scores the rows of the others as well, and then masks them.
    # Sinkhorn's rounds are not counted, and are most of what takes time here.
    of = replace(config(), candidate_topk_blocks=TOKENS, hc_sinkhorn_iters=1)
    assert everything(TOKENS, of).flops == products_of_torch(of)


def test_bytes_are_those_of_the_files_but_for_the_rows_that_tokens_bring() -> None:
    of, shards = config(), Shards.open(MINI, config())
    needed = {"dense", "routed experts"}
    held = sum(
        entry.nbytes
        for name, entry in shards.tensors.items()
        if kind_of(name) in needed and not name.endswith(".bias_vl") and name != "embed.weight"
    )
    window = TOKENS * of.head_dim * 2
    rows = of.num_hidden_layers * window
    compressed = [layer for layer in range(8) if of.compress_ratios[layer]]
    rows += sum(TOKENS // of.compress_ratios[layer] * of.head_dim * 2 for layer in compressed)
    keys = [TOKENS // of.compress_ratios[layer] for layer in of.index_source_layer_ids]
    rows += sum(keys) * of.index_head_dim * 2
    engram = len(of.engram_layer_ids) * of.engram_rows_per_token * (of.engram_head_dim + 1)
    rows += TOKENS * (engram + of.hidden_size * 2)
    assert everything(TOKENS).nbytes == held + rows


def test_what_is_not_picked_is_not_read_and_what_grows_with_the_prompt_grows() -> None:
    few, many = layer_work(config(), 3, TOKENS, 1), layer_work(config(), 3, TOKENS, 16)
    assert many[EXPERTS].nbytes == 16 * few[EXPERTS].nbytes
    assert many[EXPERTS].flops == few[EXPERTS].flops
    assert many[DENSE] == few[DENSE]
    longer = layer_work(config(), 6, 4096, 16)
    twice = layer_work(config(), 6, 8192, 16)
    # A layer after the candidate source chooses among 16 rows: linear from there on.
    assert twice[INDEX].flops / longer[INDEX].flops == pytest.approx(2, rel=0.01)
    source = [layer_work(config(), 5, tokens, 16)[INDEX].flops for tokens in (4096, 8192)]
    assert source[1] / source[0] == pytest.approx(4, rel=0.01)
    assert twice[ATTENTION].flops / longer[ATTENTION].flops == pytest.approx(2, rel=0.01)


def test_the_floor_takes_the_longer_of_reading_and_computing_in_each_layer() -> None:
    work = [{"a": Work(100, 10), "b": Work(100, 10)}, {"c": Work(10, 4000)}]
    assert floor_seconds(work, bytes_per_s=100, flops_per_s=1000) == pytest.approx(2 + 4)
