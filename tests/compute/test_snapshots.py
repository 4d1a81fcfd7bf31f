"""States on disk: conversations go on after a restart, and what is not trustworthy is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compute.kept_states import KeptState, KeptStates
from compute.sequence import SequenceState
from compute.snapshots import SUFFIX, Snapshots, identity_of
from protocol.errors import ResourceError
from tests.faults import damage
from tests.golden.cases import MINI
from tests.golden.harness import config

CONFIG = config()


def state_of(length: int, seed: int = 0) -> KeptState:
    """A state of `length` tokens with random content of the right shapes."""
    draw = torch.Generator().manual_seed(seed)
    state = SequenceState(CONFIG, torch.device("cpu"))
    state.windows.copy_(torch.randn(state.windows.shape, generator=draw))
    state.length, state.last_key_source = length, CONFIG.kv_source_layer_ids[-1]
    for layer in CONFIG.kv_source_layer_ids:
        rows, rest = divmod(length, CONFIG.compress_ratios[layer])
        state.compressed[layer].append(
            torch.randn(rows, CONFIG.head_dim, generator=draw).bfloat16()
        )
        keys = torch.randn(rows, CONFIG.index_head_dim, generator=draw).bfloat16()
        state.index_keys[layer].append(keys)
        pending = torch.randn(2, rest, CONFIG.head_dim, generator=draw)
        state.pending(layer, length).copy_(pending)
    tokens = tuple((seed * 7 + i) % 400 for i in range(length))
    logits = torch.randn(CONFIG.vocab_size, generator=draw) if length % 2 else None
    nbytes = state.nbytes + 8 * length + (logits.nbytes if logits is not None else 0)
    return KeptState(tokens, state.snapshot(), logits, nbytes)


def opened(directory: Path, budget: int = 1 << 30, identity: str = "a" * 32) -> Snapshots:
    return Snapshots(directory, budget, identity, CONFIG)


def saved(directory: Path, *states: KeptState, budget: int = 1 << 30) -> list[Path]:
    """Write `states` as one process would, one after another; the files in order of writing."""
    files: list[Path] = []
    for state in states:
        store = opened(directory, budget)
        store.save(state)
        store.close()
        files += [path for path in sorted(directory.glob(f"*{SUFFIX}")) if path not in files]
        for age, path in enumerate(reversed(files)):
            if path.exists():
                os.utime(path, (1e9 - age, 1e9 - age))
    return files


def equal(one: KeptState, other: KeptState) -> bool:
    same = one.tokens == other.tokens and one.snapshot.keys() == other.snapshot.keys()
    for name, value in one.snapshot.items():
        found = other.snapshot[name]
        if isinstance(value, torch.Tensor):
            same &= value.dtype == found.dtype and torch.equal(value, found)  # type: ignore[union-attr, arg-type]
        else:
            same &= value == found
    if one.logits is None or other.logits is None:
        return same and one.logits is other.logits
    return same and torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 37])
def test_a_state_comes_back_bit_for_bit_after_a_restart(tmp_path: Path, length: int) -> None:
    state = state_of(length)
    saved(tmp_path, state)
    found = opened(tmp_path).longest([*state.tokens, 5], 0)
    assert found is not None and equal(found, state)
    again = SequenceState(CONFIG, torch.device("cpu"))
    again.restore(found.snapshot)
    assert again.length == length


def test_the_longest_beginning_is_found_and_a_shorter_one_is_not_read(tmp_path: Path) -> None:
    long, short = state_of(20), state_of(8)
    saved(tmp_path, short, long)
    store = opened(tmp_path)
    found = store.longest([*long.tokens, 1], 0)
    assert found is not None and len(found.tokens) == 20
    found = store.longest([*long.tokens[:12], 399], 0)
    assert found is not None and len(found.tokens) == 8
    assert store.longest([*long.tokens, 1], 20) is None
    assert store.longest([399, 398], 0) is None


def test_a_whole_prompt_is_reused_only_with_its_logits(tmp_path: Path) -> None:
    with_logits, without = state_of(7), state_of(8)
    saved(tmp_path, with_logits, without)
    store = opened(tmp_path)
    found = store.longest(with_logits.tokens, 0)
    assert found is not None and found.logits is not None
    found = store.longest(without.tokens, 0)
    assert found is not None and len(found.tokens) == 7


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _noise(path: Path) -> None:
    path.write_bytes(os.urandom(5000))


def _tokens(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]))
    path.write_bytes(data[:at] + bytes([9]) + data[at + 1 :])


def _tokens_without_a_length(path: Path) -> None:
    save_file({"tokens": torch.tensor(7, dtype=torch.int32)}, path)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage", [_flip, _cut, _empty, _noise, _tokens, _tokens_without_a_length, _pipe]
)
@pytest.mark.parametrize("late", [False, True])
def test_a_damaged_file_is_refused_and_removed(
    tmp_path: Path, damage: Callable[[Path], None], late: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    state = state_of(20)
    (path,) = saved(tmp_path, state)
    if not late:
        damage(path)
    store = opened(tmp_path)
    if late:
        damage(path)
    prompt = [*state.tokens, 1]
    assert store.longest(prompt, 0) is None
    if damage is _tokens and not late:
        prompt[0] = 9  # what the file now claims to begin with
        assert store.longest(prompt, 0) is None
    assert store.refused == 1 and not path.exists()
    assert "refused and removed" in capfd.readouterr().err


def test_a_state_of_other_shapes_is_refused_though_its_digest_holds(tmp_path: Path) -> None:
    state = state_of(20)
    windows = state.snapshot["windows"]
    assert isinstance(windows, torch.Tensor)
    saved(tmp_path, replace(state, snapshot={**state.snapshot, "windows": windows[1:].clone()}))
    store = opened(tmp_path)
    assert store.longest([*state.tokens, 1], 0) is None and store.refused == 1


def test_a_damaged_file_does_not_hide_a_shorter_good_one(tmp_path: Path) -> None:
    short, long = state_of(8), state_of(20)
    files = saved(tmp_path, short, long)
    _flip(files[1])
    found = opened(tmp_path).longest([*long.tokens, 1], 0)
    assert found is not None and len(found.tokens) == 8


def test_a_state_of_another_model_is_not_used(tmp_path: Path) -> None:
    state = state_of(20)
    (path,) = saved(tmp_path, state)
    assert opened(tmp_path, identity="b" * 32).longest([*state.tokens, 1], 0) is None
    assert path.exists()
    # Not even where it has been given a name of this model.
    path.rename(path.with_name(path.name.replace("a" * 32, "b" * 32)))
    store = opened(tmp_path, identity="b" * 32)
    assert store.longest([*state.tokens, 1], 0) is None and store.refused == 1


def test_identity_changes_with_the_checkpoint_and_the_arithmetic(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in MINI.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    first = identity_of(copy, "cpu", 512)
    assert identity_of(copy, "cpu", 512) == first
    assert identity_of(copy, "cuda", 512) != first and identity_of(copy, "cpu", 256) != first
    shard = next(copy.glob("*.safetensors"))
    os.utime(shard, (1, 1))
    assert identity_of(copy, "cpu", 512) != first


@pytest.mark.timeout(10)
def test_what_is_no_file_beside_the_shards_says_nothing_of_the_model(tmp_path: Path) -> None:
    copy = damage.copy_of_mini(tmp_path)
    before = identity_of(copy, "cpu")
    (copy / "notes.json").mkdir()
    os.mkfifo(copy / "pipe.json")
    (copy / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert identity_of(copy, "cpu") == before


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    states = [state_of(20, seed) for seed in range(4)]
    size = saved(tmp_path / "probe", states[0])[0].stat().st_size
    directory = tmp_path / "states"
    saved(directory, *states[:3], budget=3 * size + 500)
    store = opened(directory, 3 * size + 500)
    assert store.longest([*states[0].tokens, 1], 0) is not None  # used now, so it stays
    store.save(states[3])
    store.close()
    left = opened(directory)
    kept = [left.longest([*state.tokens, 1], 0) is not None for state in states]
    assert kept == [True, False, True, True]
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 3 * size + 500


def test_nobody_else_can_read_what_was_said(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir(mode=0o755)
    (path,) = saved(tmp_path / "new", state_of(5))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_an_unusable_directory_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="--snapshot-dir"):
        opened(tmp_path / "file")


def test_a_full_disk_costs_the_state_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compute.snapshots.save_file", full)
    store = opened(tmp_path)
    store.save(state_of(5))
    store.close()
    assert store.dropped == 1 and not list(tmp_path.iterdir())
    assert "No space left" in capfd.readouterr().err


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / "x.partial").write_bytes(b"half")
    opened(tmp_path)
    assert not list(tmp_path.iterdir())


def test_kept_states_continue_from_disk_where_memory_has_less(tmp_path: Path) -> None:
    state = state_of(21)
    saved(tmp_path, state)
    kept = KeptStates(64 << 20, opened(tmp_path))
    found = kept.longest([*state.tokens, 3])
    assert found is not None and equal(found, state)
    assert kept.nbytes == state.nbytes
    sequence = SequenceState(CONFIG, torch.device("cpu"))
    sequence.restore(state_of(30).snapshot)
    kept.keep(state_of(30).tokens, sequence)
    kept.close()
    assert len(opened(tmp_path)) == 2
