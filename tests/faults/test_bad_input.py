"""Whatever is wrong with what a person gives: one line that names it, an exit code, nothing left.

Every case goes through the command line, as a process of its own. What exactly each check finds is
tried closer to it, in tests/protocol.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from launch.generate import generate_command
from tests.faults import damage

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 60.0
EXPERT = "layers.3.ffn.experts.2.w1.weight"
PROMPT = ("--prompt", "hello")


@dataclass(frozen=True)
class Refusal:
    """How a command ended; `line` is all that it said of the error."""

    code: int
    line: str
    started: bool


def refuse(
    tmp_path: Path, checkpoint: Path, *arguments: str, before: Callable[[], None] | None = None
) -> Refusal:
    """Run `headrace generate`, which has to fail, and check what no failure may leave behind."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    # The last --runtime-dir counts, so a test can give another.
    command = ["generate", str(checkpoint), "--runtime-dir", str(runtime), "--max-tokens", "2"]
    process = subprocess.Popen(
        [sys.executable, "launch.py", *command, "--readers", "1", "--threads", "1", *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=before,
    )
    text, said = process.communicate(timeout=PATIENCE_S)
    assert text == "", "a failed command printed text"
    assert "Traceback" not in said
    errors = [line for line in said.splitlines() if line.startswith("headrace: ")]
    assert len(errors) == 1, said
    # Nothing but progress stands before the one line, and nothing after it.
    assert said.endswith(f"{errors[0]}\n")
    line = errors[0].removeprefix("headrace: ")
    assert said.count(line) == 1, f"said twice: {said}"
    assert list(runtime.iterdir()) == [], "the runtime directory is not empty"
    assert _session(process.pid) == [], "a child lives on"
    return Refusal(process.returncode, line, started=": ready" in said)


def _session(leader: int) -> list[int]:
    """Processes that belong to the command's session."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # ended in this moment
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(path.name))
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return damage.copy_of_mini(tmp_path)


# --- the checkpoint -------------------------------------------------------------------------------


def _another_model(checkpoint: Path) -> None:
    with damage.edited(checkpoint / "config.json") as whole:
        whole["model_type"] = "deepseek_v4"


def _missing_key(checkpoint: Path) -> None:
    with damage.config(checkpoint) as text:
        del text["index_topk"]


def _ratio_without_source(checkpoint: Path) -> None:
    with damage.config(checkpoint) as text:
        text["kv_source_layer_ids"] = [5]


def _missing_shard(checkpoint: Path) -> None:
    damage.shard_of(checkpoint, EXPERT).unlink()


def _missing_tensor(checkpoint: Path) -> None:
    damage.rewrite_header(damage.shard_of(checkpoint, EXPERT), lambda header: header.pop(EXPERT))


def _cut_short(checkpoint: Path) -> None:
    path = damage.shard_of(checkpoint, EXPERT)
    os.truncate(path, path.stat().st_size - 1000)


def _long_header(checkpoint: Path) -> None:
    with damage.shard_of(checkpoint, EXPERT).open("r+b") as file:
        file.write((1 << 40).to_bytes(8, "little"))


def _header(key: str, value: object) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        path = damage.shard_of(checkpoint, EXPERT)
        damage.rewrite_header(path, lambda header: header[EXPERT].__setitem__(key, value))

    return change


def _overlap(checkpoint: Path) -> None:
    def change(header: damage.Json) -> None:
        other = header["layers.3.ffn.experts.2.w3.weight"]
        other["data_offsets"] = header[EXPERT]["data_offsets"]

    damage.rewrite_header(damage.shard_of(checkpoint, EXPERT), change)


def _config_with(key: str, value: object) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        with damage.config(checkpoint) as text:
            text[key] = value

    return change


def _no_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()


def _broken_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"model": 5}')


@pytest.mark.parametrize(
    "harm, file, said",
    [
        (_another_model, "config.json", "model_type is 'deepseek_v4'"),
        (_missing_key, "config.json", "index_topk is missing"),
        (_ratio_without_source, "config.json", "layer 2 has compress ratio 2 but no kv source"),
        (_missing_shard, "model-00006-of-00015.safetensors", "missing, though"),
        (_missing_tensor, "model-00006-of-00015.safetensors", f"{EXPERT} is missing"),
        (_cut_short, "model-00006-of-00015.safetensors", "it was cut short"),
        (_long_header, "model-00006-of-00015.safetensors", f"header length {1 << 40}"),
        (_header("dtype", "U8"), "model-00006-of-00015.safetensors", f"{EXPERT} is U8"),
        (_header("shape", [32, 128]), "model-00006-of-00015.safetensors", "expected [64, 64]"),
        (
            _header("data_offsets", [1 << 40, (1 << 40) + 4096]),
            "model-00006-of-00015.safetensors",
            EXPERT,
        ),
        (_overlap, "model-00006-of-00015.safetensors", "overlaps"),
        (
            _config_with("engram_num_embeddings", [1362, 9999]),
            "model-00015-of-00015.safetensors",
            "has shape [1552, 32], expected [9999, 32]",
        ),
        (
            _config_with("engram_vocab_size", 300),
            "config.json",
            "states 1362 rows for layer 1, but engram_vocab_size 300 gives",
        ),
        (
            _config_with("engram_compressed_vocab_size", 400),
            "tokenizer.json",
            "has 415 classes",
        ),
        (_no_tokenizer, "tokenizer.json", "missing"),
        (_broken_tokenizer, "tokenizer.json", "tokenizer"),
        (
            lambda checkpoint: damage.set_byte(checkpoint, "layers.3.attn.wq_a.scale", 255),
            "model-00006-of-00015.safetensors",
            "layers.3.attn.wq_a.scale holds the scale byte 255 (NaN)",
        ),
    ],
    ids=[
        "another model",
        "a missing key",
        "a layer without a source",
        "a missing shard",
        "a missing tensor",
        "a shard cut short",
        "a header longer than the file",
        "a wrong dtype",
        "a wrong shape",
        "offsets out of range",
        "overlapping offsets",
        "more engram rows than the table has",
        "rows that the hash does not give",
        "another tokenizer's map",
        "no tokenizer",
        "a broken tokenizer",
        "a scale that is not a number",
    ],
)
def test_a_damaged_checkpoint_is_named_by_file(
    tmp_path: Path, checkpoint: Path, harm: Callable[[Path], None], file: str, said: str
) -> None:
    harm(checkpoint)
    refusal = refuse(tmp_path, checkpoint, *PROMPT)
    assert refusal.code == 3
    assert f"{checkpoint / file}: " in refusal.line and said in refusal.line


@pytest.mark.parametrize("place", ["nowhere", "checkpoint/config.json", "x" * 5000])
def test_no_such_directory(tmp_path: Path, checkpoint: Path, place: str) -> None:
    refusal = refuse(tmp_path, tmp_path / place, *PROMPT)
    assert (refusal.code, refusal.started) == (3, False)
    shown = tmp_path / (place if len(place) < 100 else place[:80] + "…")
    assert refusal.line == f"{shown}: no such directory; give a checkpoint's directory"


# --- the request ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", " \n"), "the prompt is empty"),
        ((), "the prompt is empty"),
        (("--prompt-ids", ""), "the prompt is empty"),
        (
            ("--prompt-ids", "0,1,2,3,4", "--max-context", "4"),
            "has 5 tokens, more than --max-context 4",
        ),
        (("--prompt-ids", "0,512"), "token id 512 is outside the vocabulary of 512"),
        (("--prompt-ids", "0,-1"), "token id -1 is outside the vocabulary of 512"),
        (("--prompt-ids", "0,٣"), "expected numbers separated by commas"),
        (("--prompt-ids", "0,x"), "expected numbers separated by commas"),
        (("--prompt-file", "/nowhere/prompt"), "/nowhere/prompt: cannot be read"),
        (("--prompt", "a", "--prompt-file", "b"), "exclude each other"),
        ((*PROMPT, "--json", "/nowhere/figures"), "/nowhere/figures: cannot be written"),
        ((*PROMPT, "--trace", "/nowhere/trace"), "/nowhere/trace: cannot be written"),
        ((*PROMPT, "--readers", "0"), "0 is not in the range 1<=x<=256"),
        ((*PROMPT, "--cache", "lots"), "'lots' is not a size"),
    ],
)
def test_a_request_that_cannot_be_run_is_refused_before_the_start(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    refusal = refuse(tmp_path, damage.MINI, *arguments)
    assert (refusal.code, refusal.started) == (2, False)
    assert said in refusal.line


@pytest.mark.parametrize(
    "option, value",
    [
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--min-p", "2"),
        ("--top-k", "-1"),
        ("--max-tokens", "0"),
        ("--seed", "9" * 30),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_after_the_start(option: str, value: str) -> None:
    with pytest.raises(click.BadParameter, match=r"range|finite"):
        generate_command.make_context("generate", ["DIR", option, value])


# --- the machine ----------------------------------------------------------------------------------


def test_too_few_slots_for_one_token_is_said_with_the_minimum(tmp_path: Path) -> None:
    for arguments in (("--slots", "29"), ("--cache", "100KiB"), ("--cache", "1%")):
        (tmp_path / arguments[1]).mkdir()
        refusal = refuse(tmp_path / arguments[1], damage.MINI, *PROMPT, *arguments)
        assert (refusal.code, refusal.started) == (2, False)
        # 8 layers of 3 experts, and 6 in flight.
        assert "one token needs 30 slots" in refusal.line and "--slots 30" in refusal.line


def test_too_little_memory_is_said_with_both_numbers(tmp_path: Path) -> None:
    checkpoint = damage.sparse_checkpoint(tmp_path, moe_intermediate_size=1 << 26)
    refusal = refuse(tmp_path, checkpoint, *PROMPT, "--slots", "30")
    assert (refusal.code, refusal.started) == (4, False)
    assert "TiB" in refusal.line and "of memory are available" in refusal.line


def test_too_little_locked_memory_is_said_with_both_numbers(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))

    refusal = refuse(tmp_path, damage.MINI, *PROMPT, "--slots", "30", "--pin", "on", before=limit)
    assert (refusal.code, refusal.started) == (4, False)
    assert "KiB of locked memory" in refusal.line and "allows 64.0 KiB" in refusal.line


def test_too_few_open_files_end_the_process_within_a_library(tmp_path: Path) -> None:
    for allowed in (9, 16, 63):
        (tmp_path / str(allowed)).mkdir()
        refusal = refuse(
            tmp_path / str(allowed),
            damage.MINI,
            *PROMPT,
            before=lambda n=allowed: resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)),  # type: ignore[misc]
        )
        assert (refusal.code, refusal.started) == (4, False)
        assert f"{allowed} files may be open, expected 64 or more" in refusal.line


def test_a_directory_that_may_not_be_searched_is_an_internal_error(
    tmp_path: Path, checkpoint: Path
) -> None:
    checkpoint.chmod(0o600)
    refusal = refuse(tmp_path, checkpoint, *PROMPT, before=_without_privileges)
    checkpoint.chmod(0o700)
    assert (refusal.code, refusal.started) == (3, False)
    assert refusal.line == f"{checkpoint / 'config.json'}: cannot be read (Permission denied)"


def test_a_home_that_may_not_be_searched_is_an_internal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir(0o000)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    arguments = ("--device", "cuda:99")
    refusal = refuse(tmp_path, damage.MINI, *PROMPT, *arguments, before=_without_privileges)
    assert refusal.code == 2 and "device 'cuda:99' cannot be used" in refusal.line


def _without_privileges() -> None:
    """Root reads everything but for these two capabilities, which others do not have."""
    drop_from_bounding_set = 24
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(drop_from_bounding_set, capability, 0, 0, 0)


def test_an_unwritable_runtime_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for number, place in enumerate(("/proc", str(tmp_path / "file"), str(tmp_path / "none"))):
        (tmp_path / str(number)).mkdir()
        refusal = refuse(tmp_path / str(number), damage.MINI, *PROMPT, "--runtime-dir", place)
        assert (refusal.code, refusal.started) == (4, False)
        assert refusal.line.startswith(f"{place}: cannot make a runtime directory there")


def test_a_runtime_directory_too_deep_for_a_socket_is_named(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    refusal = refuse(tmp_path, damage.MINI, *PROMPT, "--runtime-dir", str(deep))
    assert (refusal.code, refusal.started) == (4, False)
    assert "longer than 107 bytes" in refusal.line
    assert list(deep.iterdir()) == []


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    refusal = refuse(tmp_path, damage.MINI, *PROMPT, "--device", "cuda:99")
    assert refusal.code == 2 and "device 'cuda:99' cannot be used" in refusal.line


# --- while it runs --------------------------------------------------------------------------------


def test_an_expert_that_cannot_be_used_fails_the_request_with_its_file(
    tmp_path: Path, checkpoint: Path
) -> None:
    for expert in range(16):
        damage.set_byte(checkpoint, f"layers.3.ffn.experts.{expert}.w1.scale", 255)
    refusal = refuse(tmp_path, checkpoint, *PROMPT)
    assert refusal.code == 7 and refusal.started
    assert "model-00006-of-00015.safetensors" in refusal.line and "byte 255" in refusal.line


def test_a_disk_that_stalls_during_a_request_is_no_stall_to_a_script(tmp_path: Path) -> None:
    stalls = ("--reader-faults", "delay:seconds=30", "--stall-timeout", "0.5")
    refusal = refuse(tmp_path, damage.MINI, *PROMPT, *stalls)
    assert refusal.code == 6 and refusal.started
    assert "did not come within 0.5 s" in refusal.line


# --- where it speaks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "redirection, code",
    [("2>&-", 0), ("2>/dev/full", 0), (">&-", 0), (">/dev/full", 4), ("<&- >&- 2>&-", 0)],
)
def test_a_standard_stream_that_cannot_be_used_crashes(redirection: str, code: int) -> None:
    ended = subprocess.run(
        ["bash", "-c", f'"$0" launch.py options generate {redirection}', sys.executable],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert [line.split(": ")[0] for line in ended.stderr.splitlines()] == ["headrace"] * (code > 0)


def test_a_letter_that_the_terminal_lacks_is_an_internal_error() -> None:
    said = "from launch.entry import open_standard_streams as o; o(); print('caf\\u00e9')"
    ended = subprocess.run(
        [sys.executable, "-c", said],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == (b"caf?\n", b"")


def test_a_prompt_that_is_not_utf_8_is_an_internal_error(tmp_path: Path) -> None:
    refusal = refuse(tmp_path, damage.MINI, "--prompt", "\udcff")
    assert (refusal.code, refusal.started) == (2, False) and "UTF-8" in refusal.line


def test_too_few_open_files_are_said_with_the_limit(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    refusal = refuse(tmp_path, damage.MINI, *PROMPT, "--readers", "30", before=limit)
    assert refusal.code == 4 and "limit is 64, raise it (ulimit -n" in refusal.line
