"""The training model computes what the reference does, learns, and comes back from its export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.config import ModelConfig
from protocol.shards import Shards
from tools.train.checkpoint import load_masters, store
from tools.train.draft import Draft, draft_loss
from tools.train.model import Model, losses
from tools.train.ngrams import ngram_hash
from tools.train.optimizer import optimizers
from tools.train.writer import write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
MINI = GOLDEN / "mini"


@pytest.fixture(scope="module")
def mini() -> tuple[ModelConfig, Model, Draft]:
    torch.manual_seed(0)
    config = ModelConfig.load(MINI)
    model, draft = Model(config, ngram_hash(MINI, config)).eval(), Draft(config).eval()
    load_masters(MINI, config, model, draft)
    return config, model, draft


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@torch.no_grad()
def test_forward_pass_is_the_reference_model(mini: tuple[ModelConfig, Model, Draft]) -> None:
    config, model, _ = mini
    case = load_file(GOLDEN / "mini_cases" / "mini_len037.safetensors")
    ids = case["prompt_ids"]
    padded = -len(ids) % config.sliding_window
    trace: list[torch.Tensor] = []
    done = model(torch.nn.functional.pad(ids, (0, padded), value=5)[None], trace)
    assert _relative(trace[0][: len(ids)], case["prefill.layers.0.ffn_in"]) < 6e-3
    logits = done.hidden[0, len(ids) - 1].float() @ model.head.weight.float().T
    # The bound of the golden data for implementations that keep probabilities in fp32.
    assert _relative(logits, case["prefill.logits"]) < 0.12


@torch.no_grad()
def test_drafts_are_the_reference_drafts(mini: tuple[ModelConfig, Model, Draft]) -> None:
    config, model, draft = mini
    case = load_file(GOLDEN / "mini_cases" / "mini_len037.safetensors")
    length, size = len(case["prompt_ids"]), config.dspark_block_size
    steps = case["spec.draft_ids"]
    main = torch.cat([case["prefill.main_hidden"], case["decode.main_hidden"].flatten(1)])[None]
    done = model(torch.zeros(1, config.sliding_window, dtype=torch.long))
    done.targets = list(main.split(config.hidden_size, -1))
    for step in (0, 7, 31):
        anchor = length + step
        tokens = torch.zeros(1, anchor + size + 2, dtype=torch.long)
        tokens[0, anchor + 1 : anchor + 1 + size] = steps[step, :size]
        logits, sure = draft(model, done, tokens, torch.tensor([anchor]))
        assert _relative(logits[0, 0], case["spec.logits"][step]) < 0.03
        assert (sure[0, 0] - case["spec.confidence"][step]).abs().max() < 0.2


def test_hash_on_the_device_is_the_engine_s(mini: tuple[ModelConfig, Model, Draft]) -> None:
    config, model, _ = mini
    ngrams = ngram_hash(MINI, config)
    assert ngrams is not None and model.hash is not None
    tokens = torch.randint(0, config.vocab_size, (2, 33))
    found = model.hash.rows(tokens)
    for sequence in range(2):
        wanted = torch.from_numpy(ngrams.rows(tokens[sequence].tolist()))
        assert torch.equal(found[:, sequence], wanted)


def test_a_few_steps_learn_one_batch() -> None:
    torch.manual_seed(0)
    config = replace(
        ModelConfig.load(MINI), hidden_size=64, n_routed_experts=4, moe_intermediate_size=32
    )
    model, draft = Model(config, ngram_hash(MINI, config)), Draft(config)
    moving = optimizers(model, draft)
    batch = torch.randint(3, 60, (1, 33))
    anchors = torch.tensor([3, 20])
    first = last = 0.0
    for _ in range(4):
        done = model(batch[:, :-1])
        loss = losses(done.hidden.flatten(0, 1), model.head.weight, batch[:, 1:].flatten()).mean()
        of_draft, _ = draft_loss(*draft(model, done, batch, anchors), batch, anchors)
        (loss + done.index_loss + of_draft).backward()
        untouched = [n for n, p in model.named_parameters() if p.grad is None]
        assert untouched == []
        for optimizer in moving:
            optimizer.step()
            optimizer.zero_grad()
        last = loss.item()
        first = first or last
    assert last < first - 0.3


@torch.no_grad()
def test_export_comes_back_as_the_same_model(
    mini: tuple[ModelConfig, Model, Draft], tmp_path: Path
) -> None:
    config, model, draft = mini
    top = json.loads((MINI / "config.json").read_bytes())
    write_checkpoint(tmp_path / "out", top, MINI, store(config, model, draft))
    assert Shards.open(tmp_path / "out", config).warnings == ()
    again = Model(config, ngram_hash(MINI, config)).eval()
    load_masters(tmp_path / "out", config, again, Draft(config))
    tokens = torch.randint(3, config.vocab_size, (1, 32))
    assert torch.equal(model(tokens).hidden, again(tokens).hidden)
