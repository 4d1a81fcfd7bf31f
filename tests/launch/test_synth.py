"""Symptoms: a synthetic checkpoint that the engine refuses, that is laid out unlike the release, or
that holds no numbers to compute with; a disk filled or a checkpoint overwritten by mistake."""

from __future__ import annotations

import hashlib
import json
import math
import resource
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from compute.model import Model
from compute.resident import ResidentExperts
from compute.weights import ModelWeights
from engram_io.local import LocalEngramSource
from launch.bench.group import TensorRows
from launch.check import inspect
from launch.contents import check_scales
from launch.synth.command import synth_command, synthesize
from launch.synth.geometry import text_config
from launch.synth.tokenizer import LAST_IDS, make_tokenizer
from launch.synth.weights import RandomWeights
from launch.synth.writer import write_checkpoint
from protocol.config import ModelConfig
from protocol.errors import HeadraceError, ResourceError, UsageError
from protocol.shards import INDEX_NAME, Shards
from protocol.tensor_table import TensorSpec, expected_tensors

REPOSITORY = Path(__file__).parents[2]
MINI = REPOSITORY / "tests" / "golden" / "data" / "mini"
PATIENCE_S = 100


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preset of that name."""
    directory = tmp_path_factory.mktemp("synth") / "mini"
    synthesize(directory, "mini", {})
    return directory


def run(
    *arguments: str, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """`headrace synth` as a process."""
    return subprocess.run(
        [sys.executable, "launch.py", "synth", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        preexec_fn=before,
    )


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file in `directory`."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


# --- the files ------------------------------------------------------------------------------------


def test_the_engine_refuses_what_synth_wrote(mini: Path) -> None:
    found = inspect(mini)
    assert (found.layers, found.experts_per_layer, found.warnings) == (8, 16, ())
    # One read of three weights and one of three scales, as in the release.
    assert found.reads_per_expert == 2
    shards = Shards.open(mini, ModelConfig.load(mini))
    assert check_scales(shards, lambda count: None) > 0


def test_the_safetensors_library_reads_other_tensors_than_were_written(mini: Path) -> None:
    index = json.loads((mini / INDEX_NAME).read_text())
    total = 0
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(mini / shard, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                assert index["weight_map"][name] == shard
                total += tensor.nbytes
                if tensor.dtype in (torch.float32, torch.bfloat16):
                    assert tensor.isfinite().all(), name
    assert index["metadata"]["total_size"] == total


def test_tensors_lie_in_other_shards_than_in_the_golden_checkpoint(mini: Path) -> None:
    """One shard each, in order: embedding, layers, head, draft layers, engram layers."""

    def shards_in_order(directory: Path) -> list[set[str]]:
        tensors = defaultdict(set)
        for name, shard in json.loads((directory / INDEX_NAME).read_text())["weight_map"].items():
            if not name.startswith(("vision.", "aligner.", "image_")):
                tensors[shard].add(name)
        return [tensors[shard] for shard in sorted(tensors)]

    ours, golden = shards_in_order(mini), shards_in_order(MINI)
    assert [len(shard) > 50 for shard in ours] == [len(shard) > 50 for shard in golden]
    # Layer 0 and 1 have the same parts in both; deeper ones are sources in other places.
    for number in (0, 1, 2, 9, 10, 11, 12, 13):
        assert ours[number] == golden[number]


def test_the_scaled_pattern_differs_from_the_released_config() -> None:
    text = text_config("released", {})
    assert text["compress_ratios"] == [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3
    assert text["kv_source_layer_ids"] == [2, 8, 14, 20]
    assert text["index_source_layer_ids"] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert text["candidate_source_layer_id"] == 20
    assert text["dspark_target_layer_ids"] == [37, 38, 39]
    assert text["engram_layer_ids"] == [1, 14]
    assert text["engram_num_embeddings"] == [384006168, 384016682]


def test_wide_has_other_widths_than_the_release(tmp_path: Path) -> None:
    text, released = text_config("wide", {}), text_config("released", {})
    differing = {key for key in released if text[key] != released[key]}
    assert differing == {
        "vocab_size",
        "num_hidden_layers",
        "n_routed_experts",
        "num_nextn_predict_layers",
        "engram_vocab_size",
        "dspark_n_routed_experts",
        "dspark_noise_token_id",
        # What follows from those.
        "compress_ratios",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "candidate_source_layer_id",
        "dspark_target_layer_ids",
        "engram_layer_ids",
        "engram_num_embeddings",
    }


@pytest.mark.parametrize("layers", [3, 4, 5, 7, 12, 41])
def test_a_number_of_layers_gives_no_config_that_holds(tmp_path: Path, layers: int) -> None:
    text = text_config("mini", {"num_hidden_layers": layers})
    document = {
        **json.loads((MINI / "config.json").read_text()),
        "text_config": {**text, "engram_compressed_vocab_size": 415},
    }
    config = ModelConfig.from_dict(document, tmp_path)
    assert len(config.engram_layer_ids) == 2
    assert all(spec.shape for spec in expected_tensors(config).values())


def test_the_same_seed_gives_other_bytes_or_another_seed_the_same(
    mini: Path, tmp_path: Path
) -> None:
    for seed in (0, 1):
        synthesize(tmp_path / str(seed), "mini", {}, seed=seed)
    first, again, other = digests(mini), digests(tmp_path / "0"), digests(tmp_path / "1")
    assert first == again
    shards = [name for name in first if name.startswith("model-")]
    assert all(first[name] != other[name] for name in shards)
    assert len(set(first.values())) == len(first)


def test_the_engram_tables_do_not_have_the_rows_asked_for(tmp_path: Path) -> None:
    config = synthesize(tmp_path / "rows", "mini", {}, engram_rows=5000)
    for rows in config.engram_num_embeddings:
        assert 5000 <= rows < 6000


# --- the numbers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As deep as the release, with other widths than any preset."""
    directory = tmp_path_factory.mktemp("synth") / "deep"
    changes = {
        "num_hidden_layers": 40,
        "hidden_size": 256,
        "n_routed_experts": 8,
        "num_nextn_predict_layers": 0,
    }
    synthesize(directory, "mini", changes)
    return directory


def test_a_forward_pass_blows_up_or_always_takes_the_same_experts(deep: Path) -> None:
    torch.set_num_threads(1)
    config = ModelConfig.load(deep)
    shards = Shards.open(deep, config)
    device = torch.device("cpu")
    picks: dict[int, Counter[int]] = defaultdict(Counter)
    sizes: list[float] = []

    def observe(name: str, layer: int, tensor: torch.Tensor) -> None:
        if name == "gate_indices":
            picks[layer].update(tensor.flatten().tolist())
        if name == "ffn_out":
            sizes.append(tensor.float().square().mean().sqrt().item())

    rows = TensorRows(LocalEngramSource.open(deep))
    weights = ModelWeights.load(shards, device)
    model = Model(config, weights, ResidentExperts.read(shards, device), rows, observe=observe)
    tokens = torch.randint(0, config.vocab_size, (96,), generator=torch.Generator().manual_seed(0))
    ticket = rows.request(0, tokens.tolist(), [])
    logits = model.forward(tokens, model.new_state(), ticket, want_all_logits=True)
    assert logits.isfinite().all()
    # Sampling has something to choose from, and different tokens lead to different answers.
    assert 0.3 < logits.std(dim=1).mean().item() < 30
    assert len(set(logits.argmax(dim=1).tolist())) > 48
    assert all(1e-3 < size < 1e3 for size in sizes)
    fair = 96 * config.num_experts_per_tok / config.n_routed_experts
    for layer, counts in picks.items():
        assert len(counts) == config.n_routed_experts, layer
        assert max(counts.values()) < 2 * fair, layer


def test_rows_of_a_large_table_repeat() -> None:
    """The released row of 256 bytes divides a power of two, and so do most widths."""
    weights = RandomWeights(0)
    spec = TensorSpec("F8_E4M3", (40_000, 256), "engram.1")
    raw = b"".join(weights("layers.1.engram.embed.weight", spec))
    rows = {raw[begin : begin + 256] for begin in range(0, len(raw), 256)}
    assert len(rows) == 40_000


def test_a_large_tensor_is_made_in_memory_as_a_whole() -> None:
    weights = RandomWeights(0)
    spec = TensorSpec("BF16", (20_000, 5120), "embed")
    tracemalloc.start()
    try:
        count = sum(len(piece) for piece in weights("embed.weight", spec))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 2 * 20_000 * 5120
    assert peak < count / 3


# --- the tokenizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [268, 512, 4096, 70_000])
def test_the_tokenizer_has_another_size_or_loses_text(size: int) -> None:
    tokenizer = make_tokenizer(size)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == size
    for text in ("Hello, world", "naïve — 東京 🌍\n\t x", "a" * 50):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert max(ids) < size and tokenizer.decode(ids) == text
    for token in LAST_IDS:
        assert tokenizer.encode(token, add_special_tokens=False).ids == [
            tokenizer.token_to_id(token)
        ]


def test_a_vocabulary_too_small_for_all_bytes_is_made_anyway() -> None:
    with pytest.raises(UsageError, match="at least 268"):
        make_tokenizer(267)


# --- what can go wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--layers", "2"), "2 layers are too few; give at least 3"),
        (("--vocab", "10"), "a vocabulary of 10 is too small"),
        (("--experts", "0"), "n_routed_experts is 0"),
        (("--experts", "2"), "num_experts_per_tok is 3, more than the 2 experts"),
        (("--set", "hidden_size=100"), "hidden_size is 100, expected a multiple of 32"),
        (("--set", 'hidden_size="wide"'), "hidden_size is 'wide', expected something like"),
        (("--set", "hiddensize=96"), "no such config key: hiddensize"),
        (("--set", "hidden_size"), "expected KEY=VALUE"),
        (("--set", "hidden_size=x"), "expected KEY=VALUE"),
    ],
)
def test_an_impossible_checkpoint_leaves_something_behind(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        synth_command.main([str(tmp_path / "new"), *arguments], standalone_mode=False)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_out_by_filling_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 30))
    with pytest.raises(ResourceError) as refused:
        synth_command.main(
            [str(tmp_path / "new"), "--engram-rows", "100000000"], standalone_mode=False
        )
    # Two tables of 33 bytes a row, and both numbers.
    assert "the checkpoint takes 6.2 GiB and 3.0 GiB are free" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty; choose another or give --force"):
        synth_command.main([str(tmp_path)], standalone_mode=False)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    forced = run(str(tmp_path), "--force", "--layers", "3")
    assert forced.returncode == 0
    assert forced.stderr.startswith(f"{tmp_path}: 3 layers, 16 experts each, ")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert inspect(tmp_path).layers == 3


def test_a_file_where_the_directory_should_be_is_an_internal_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"file: cannot be made \(File exists\)"):
        synthesize(tmp_path / "file", "mini", {})


def test_a_disk_that_takes_no_more_leaves_half_a_checkpoint_that_looks_whole(
    tmp_path: Path,
) -> None:
    """A limit on file sizes fails a write as a full disk does, in the middle of a shard."""
    limit = 200_000
    ended = run(
        str(tmp_path),
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert ended.returncode == 4
    lines = ended.stderr.splitlines()
    assert len(lines) == 1 and "cannot be written (File too large)" in lines[0]
    left = {path.name for path in tmp_path.iterdir()}
    assert INDEX_NAME not in left and not any(name.endswith(".partial") for name in left)


def test_overwriting_that_fails_leaves_the_old_index_over_new_shards(tmp_path: Path) -> None:
    config = synthesize(tmp_path, "mini", {"num_hidden_layers": 3})
    document = json.loads((tmp_path / "config.json").read_text())

    def fails(name: str, spec: TensorSpec) -> Iterator[bytes]:
        if name.startswith("layers.1."):
            raise KeyboardInterrupt
        yield bytes(math.prod(spec.shape) * {"F32": 4, "BF16": 2}.get(spec.dtype, 1))

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, document, {}, fails)
    assert not (tmp_path / INDEX_NAME).exists()
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(HeadraceError, match=INDEX_NAME):
        Shards.open(tmp_path, config)


@pytest.mark.parametrize("surplus", [-1, 1])
def test_a_tensor_of_the_wrong_length_shifts_all_that_follow(tmp_path: Path, surplus: int) -> None:
    text: dict[str, Any] = text_config("mini", {"num_hidden_layers": 3})
    document = {
        **json.loads((MINI / "config.json").read_text()),
        "text_config": {**text, "engram_compressed_vocab_size": 415},
    }
    with pytest.raises(HeadraceError, match=r"embed\.weight: 13107[13] bytes .* expected 131072"):
        write_checkpoint(tmp_path, document, {}, lambda name, spec: [bytes(131072 + surplus)])


def test_the_writer_loads_the_command_line_or_torch() -> None:
    """A training script exports through it."""
    script = (
        "import launch.synth.writer, sys; "
        "print(sorted({'click', 'rich', 'torch', 'zmq'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\n"
