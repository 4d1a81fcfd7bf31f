"""`headrace fit`: what it learns, what it keeps, and what refuses to use what was kept."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from compute.assembly import fitted_gates
from compute.predictor import FITTED_FORMAT, FittedGates, predict
from compute.weights import GateWeights, ModelWeights, load_gates
from launch.cli import cli
from launch.fit.learning import (
    KEPT_PART,
    LEAST_RARE_PICKS,
    LEAST_TOKENS,
    RARE_AFTER,
    calibrate_rare,
    kept_tokens,
    rare_experts,
)
from launch.fit.regression import calibrate, fit_changes, margins, quality
from protocol.config import ModelConfig
from protocol.errors import CheckpointError
from protocol.identity import PREDICTOR_NAME, checkpoint_identity
from protocol.route_trace import MOE, STREAM, InputsTrace, InputsWriter, TraceHeader, inputs_path
from protocol.shards import Shards
from tests.ipc.running_group import MINI, RunningGroup

CPU = torch.device("cpu")
TOKENS = 600


def a_gate(seed: int, experts: int = 16, hidden: int = 24) -> GateWeights:
    random = torch.Generator().manual_seed(seed)
    return GateWeights(
        torch.randn(experts, hidden, generator=random),
        0.1 * torch.randn(experts, generator=random),
    )


def test_a_gate_on_a_turned_input_is_found_and_noise_leaves_the_gate_as_it_is() -> None:
    random = torch.Generator().manual_seed(2)
    gate, turn = a_gate(1), torch.linalg.qr(torch.randn(24, 24, generator=random)).Q
    later = torch.randn(TOKENS, 24, generator=random)
    earlier, logits = later @ turn.T, later @ gate.weight.T
    picks = margins(later, gate, 3).topk(3).indices
    fitted = fit_changes(earlier[:400], logits[:400], gate, 16)[0].applied(gate)
    every = torch.ones(TOKENS - 400, 16, dtype=torch.bool)
    own = quality(margins(earlier[400:], gate, 3), picks[400:], every, 1, 0)
    moved = quality(margins(earlier[400:], fitted, 3), picks[400:], every, 1, 0)
    assert own.recall_k < 0.5 and moved.recall_k > 0.98
    # On its own input a gate is right already, and nothing is added.
    change = fit_changes(later, logits, gate, 16)[0]
    assert (change.up @ change.down).abs().max() < 1e-4


def test_a_smaller_rank_keeps_the_directions_that_matter() -> None:
    random = torch.Generator().manual_seed(3)
    gate, x = a_gate(4), torch.randn(TOKENS, 24, generator=random)
    missing = torch.randn(16, 2, generator=random) @ torch.randn(2, 24, generator=random)
    logits = x @ (gate.weight + missing).T
    change = fit_changes(x, logits, gate, 2)[0]
    assert change.up.shape == (16, 2) and change.down.shape == (2, 24)
    assert (change.up @ change.down - missing).abs().max() < 0.02 * missing.abs().max()


def test_probabilities_mean_what_they_say() -> None:
    random = torch.Generator().manual_seed(5)
    scores = torch.randn(20000, generator=random)
    picked = torch.rand(20000, generator=random) < torch.sigmoid(3 * scores - 1)
    slope, offset = calibrate(scores, picked)
    assert abs(slope - 3) < 0.2 and abs(offset + 1) < 0.1
    # However small the scores are.
    assert calibrate(scores / 1000, picked) == pytest.approx((1000 * slope, offset), rel=1e-3)
    # A clean split must not run away.
    assert all(np.isfinite(calibrate(scores, scores > 0)))


def test_rare_is_what_none_of_the_last_tokens_picked() -> None:
    picks = torch.zeros(100, 2, dtype=torch.int64)
    picks[:, 1] = 1
    picks[40, 1] = 2
    rare = rare_experts(picks, 4)
    # 0 is picked by all; 2 by one; 3 by none, and 1 by all but one.
    assert not rare[:, :2].any()
    known = torch.arange(100) >= RARE_AFTER
    assert torch.equal(rare[:, 3], known), "what came before the trace is not known"
    # Of the last token that counts a pick is seen, the one after it has forgotten.
    at = torch.arange(100) - 40
    assert torch.equal(rare[:, 2], known & ((at <= 0) | (at > RARE_AFTER)))


def test_probabilities_are_those_of_rare_experts() -> None:
    """Experts 0 to 3 take turns and are in steady use; of 4 to 7 each stays away for long, then
    comes twice in a row. One score each, which foretells both, but the rare ones worse."""
    random = torch.Generator().manual_seed(7)
    tokens = 6000
    picks = torch.stack([torch.arange(tokens) % 2, 2 + torch.arange(tokens) % 2], 1)
    comes = torch.rand(tokens // 50, generator=random) < 0.5
    first = torch.arange(len(comes)) * 50 + 49
    picks[first[comes], 1] = 4 + torch.arange(int(comes.sum())) % 4
    scores = torch.full((tokens, 8), -9.0).scatter_(1, picks, 1.0)
    # Where none comes one is foretold all the same, as likely as the others.
    scores[first[~comes], 4 + torch.arange(int((~comes).sum())) % 4] = 1.0
    rare = rare_experts(picks, 8)
    slope, offset = calibrate_rare(scores, picks, rare)
    everywhere = calibrate_rare(scores, picks, torch.ones_like(rare))
    assert torch.sigmoid(torch.tensor(slope + offset)) < 0.65
    assert torch.sigmoid(torch.tensor(sum(everywhere))) > 0.95
    # Of too few rare picks nothing is learnt.
    few = rare & (rare & (scores > 0)).cumsum(0).le(LEAST_RARE_PICKS // 8)
    assert calibrate_rare(scores, picks, few) == everywhere


@pytest.mark.parametrize("tokens", [LEAST_TOKENS, 600, 1024 * KEPT_PART, 21_000])
def test_a_fifth_is_kept_from_fitting_and_of_much_text_from_many_places(tokens: int) -> None:
    kept = kept_tokens(tokens)
    assert abs(int(kept.sum()) / tokens - 1 / KEPT_PART) < 0.06
    assert kept[: len(kept) // 2].any() == (tokens > 10_000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(MINI, tmp_path_factory.mktemp("fit") / "mini"))


@pytest.fixture(scope="module")
def fitted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace's activations in which every layer's input is the one before it, turned."""
    trace = tmp_path_factory.mktemp("traces") / "t.routes"
    config = ModelConfig.load(checkpoint)
    header = TraceHeader(
        checkpoint_identity(checkpoint), config.num_hidden_layers, config.n_routed_experts,
        config.num_experts_per_tok, config.hidden_size, 1, 0, 6, (),
    )  # fmt: skip
    random = np.random.default_rng(6)
    turn = np.linalg.qr(random.standard_normal((config.hidden_size, config.hidden_size)))[0]
    x = random.standard_normal((TOKENS, config.hidden_size))
    with InputsWriter(inputs_path(trace), header) as writer:
        for layer in range(config.num_hidden_layers):
            foreseen = x + 0.1 * random.standard_normal(x.shape)
            writer.write(0, layer, foreseen.astype(np.float16), x.astype(np.float16))
            x = x @ turn
    ran = CliRunner().invoke(cli, ["fit", str(checkpoint), str(trace), "--rank", "16"])
    assert ran.exit_code == 0, ran.output
    return trace


def test_the_kept_file_predicts_what_was_recorded(checkpoint: Path, fitted: Path) -> None:
    config, inputs = ModelConfig.load(checkpoint), InputsTrace(inputs_path(fitted))
    own = load_gates(Shards.open(checkpoint, config), CPU)
    identity = checkpoint_identity(checkpoint)
    gates = FittedGates.load(checkpoint / PREDICTOR_NAME, own, identity)
    layers, k = config.num_hidden_layers, config.num_experts_per_tok
    assert set(gates.gates) == {
        *((MOE, d, layer) for d in (1, 2, 3) for layer in range(d, layers)),
        *((STREAM, d, layer) for d in (1, 2, 3) for layer in range(d - 1, layers)),
    }
    before, after = (torch.from_numpy(inputs.layer(n)[1]).bfloat16() for n in (3, 4))
    gate = gates.gate(MOE, 1, 4, own[4])
    right = first = 0
    for token in range(0, TOKENS, 20):
        truth = set(predict(after[token : token + 1], own[4], k, k).experts.tolist())
        said = predict(before[token : token + 1], gate.weights, k, 2 * k)
        right += len(truth & set(said.experts[:k].tolist()))
        scores = gate.scores(said.margins)
        first += bool(scores[0] > 0 > scores[-1])
    assert right > 0.9 * k * TOKENS / 20 and first > 0.9 * TOKENS / 20


@pytest.mark.parametrize(
    "changes",
    [
        {"calibration": torch.tensor(1.0)},
        {"calibration": torch.tensor([1.0, torch.nan])},
        {"up": torch.ones(3, 2)},
        {"up": torch.ones(5, 4, 2)},
        {"down": torch.ones(4)},
    ],
    ids=str,
)
def test_a_file_of_senseless_tensors_is_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor]
) -> None:
    own = [GateWeights(torch.ones(4, 8), torch.zeros(4))] * 2
    parts = {"up": torch.ones(4, 2), "down": torch.ones(2, 8), "calibration": torch.ones(2)}
    path, metadata = tmp_path / "kept", {"format": FITTED_FORMAT, "identity": "ab"}
    save_file({f"moe.1.1.{name}": part for name, part in parts.items()}, path, metadata)
    assert set(FittedGates.load(path, own, "ab").gates) == {(MOE, 1, 1)}
    save_file({f"moe.1.1.{name}": part for name, part in (parts | changes).items()}, path, metadata)
    with pytest.raises(CheckpointError, match="do not fit the model"):
        FittedGates.load(path, own, "ab")


def test_fitting_again_or_for_another_checkpoint_does_not_mix(
    checkpoint: Path, fitted: Path, tmp_path: Path
) -> None:
    identity = checkpoint_identity(checkpoint)
    assert identity == checkpoint_identity(MINI), "what was fitted must not change the identity"
    own = load_gates(Shards.open(MINI, ModelConfig.load(MINI)), CPU)
    kept = checkpoint / PREDICTOR_NAME
    with pytest.raises(CheckpointError, match="another checkpoint"):
        FittedGates.load(kept, own, "0" * 32)
    with pytest.raises(CheckpointError, match="do not fit the model"):
        FittedGates.load(kept, [replace(g, weight=g.weight[:, :-1]) for g in own], identity)
    cut = tmp_path / "cut"
    cut.write_bytes(kept.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cannot be read"):
        FittedGates.load(cut, own, identity)
    other = Path(shutil.copytree(MINI, tmp_path / "other"))
    shard = next(other.glob("*layers*.safetensors"), sorted(other.glob("*.safetensors"))[1])
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 :] = bytes(byte ^ 1 for byte in content[len(content) // 2 :])
    shard.write_bytes(content)
    ran = CliRunner().invoke(cli, ["fit", str(other), str(fitted)])
    assert isinstance(ran.exception, Exception) and "another checkpoint" in str(ran.exception)


def test_a_group_uses_what_was_fitted(checkpoint: Path, fitted: Path) -> None:
    with RunningGroup(checkpoint) as group:
        assert group.group.facts["prediction"] == "fitted gates"
        group.tokens(list(range(30, 40)), 3)


def test_a_damaged_file_is_named_and_the_layers_own_gates_serve(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = ModelWeights.load(Shards.open(MINI, ModelConfig.load(MINI)), CPU)
    assert not fitted_gates(tmp_path, weights).gates
    (tmp_path / PREDICTOR_NAME).write_bytes(b"\x08" + bytes(40))
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(MINI / name, tmp_path)
    assert not fitted_gates(tmp_path, weights).gates
    assert PREDICTOR_NAME in capfd.readouterr().err
    (tmp_path / PREDICTOR_NAME).unlink()
    os.mkfifo(tmp_path / PREDICTOR_NAME)
    assert not fitted_gates(tmp_path, weights).gates
    assert "not a file" in capfd.readouterr().err
