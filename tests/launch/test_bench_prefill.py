"""Symptoms: a prefill timed over experts that lay elsewhere than it says, cut otherwise than the
engine cuts it, or whose figures a script cannot find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from compute.device_experts import DeviceExperts
from launch.bench import prefill
from launch.bench.commands import prefill_command
from launch.bench.prefill import chunk_ends
from protocol.errors import UsageError

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"


def test_prompts_are_cut_as_the_engine_cuts_them() -> None:
    assert chunk_ends(5, 8) == [5]
    assert chunk_ends(8, 8) == [8]
    assert chunk_ends(20, 8) == [8, 16, 20]


def test_figures_of_every_prompt_are_there_and_the_experts_lie_where_they_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere: list[int] = []
    prefilled = prefill.PrefillBench._prefill

    def watched(bench: prefill.PrefillBench, prompt: list[int]) -> float:
        elsewhere.append(bench._tier.resident)
        return prefilled(bench, prompt)

    monkeypatch.setattr(prefill.PrefillBench, "_prefill", watched)
    arguments = [str(MINI), "--device", "cpu", "--readers", "1", "--passes", "1", "--json"]
    lengths = ["--tokens", "3", "--tokens", "20", "--chunk-tokens", "16"]
    result = CliRunner().invoke(prefill_command, arguments + lengths)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["hbm_gb_s"] > 0 and figures["tflops"] > 0 and figures["chunk_tokens"] == 16
    short, long = figures["prompts"]
    assert (short["tokens"], short["chunks"]) == (3, 1)
    assert (long["tokens"], long["chunks"]) == (20, 2)
    for of in (short, long):
        assert min(of["floor_ms"], of["resident_ms"], of["from_arena_ms"]) > 0
        assert of["ratio"] == pytest.approx(of["resident_ms"] / of["floor_ms"])
        assert of["resident_tokens_per_s"] == pytest.approx(1000 * of["tokens"] / of["resident_ms"])
        assert of["bytes"] == sum(part["bytes"] for part in of["parts"].values())
        assert of["flops"] == sum(part["flops"] for part in of["parts"].values())
    # Three tokens pick at most 9 of a layer's 16 experts, and at least 3.
    assert 8 * 3 <= short["experts"] <= 8 * 9 and short["experts"] < long["experts"] <= 8 * 16
    assert short["bytes"] < long["bytes"]
    # A warm and a timed pass, both with all of the 128 experts on the device and then with none.
    assert elsewhere == [128, 128, 0, 0] * 2


def test_a_prompt_longer_than_the_model_reads_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeviceExperts, "__init__", None)
    with pytest.raises(UsageError, match="--tokens 1048577 is more than the model's limit"):
        prefill.run(MINI, "cpu", [16, 1048577], chunk_tokens=512, passes=1, readers=1)
