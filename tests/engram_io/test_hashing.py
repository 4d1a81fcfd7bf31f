"""Row ids against the reference's, for every way to split a sequence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from engram_io.hashing import NgramHash, hash_multipliers, table_primes
from engram_io.token_map import TokenMap
from protocol.config import ModelConfig
from protocol.errors import CheckpointError

DATA = Path(__file__).parents[1] / "golden" / "data"
MINI = DATA / "mini"
CASES = sorted((DATA / "mini_cases").glob("*.safetensors"))
Int64 = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.load(MINI)


@pytest.fixture(scope="module")
def mini(config: ModelConfig) -> NgramHash:
    classes = TokenMap.load(MINI, config).classes
    return NgramHash.from_config(config, classes, MINI / "config.json")


@pytest.fixture(scope="module")
def real_data() -> dict[str, npt.NDArray[np.generic]]:
    loaded: dict[str, npt.NDArray[np.generic]] = load_file(
        DATA / "engram_real" / "engram_hash.safetensors"
    )
    return loaded


@pytest.fixture(scope="module")
def real(config: ModelConfig, real_data: dict[str, npt.NDArray[np.int64]]) -> NgramHash:
    about = json.loads((DATA / "engram_real" / "engram_hash.json").read_text())
    layout = about["layout"]
    released = replace(
        config,
        vocab_size=129280,
        engram_layer_ids=tuple(layout["layer_ids"]),
        engram_num_embeddings=tuple(about["table_rows"]),
        engram_max_ngram_size=layout["max_ngram"],
        engram_n_heads=layout["heads"],
        engram_vocab_size=layout["engram_vocab_size"],
        engram_pad_token_id=layout["pad_id"],
        engram_compressed_vocab_size=layout["compressed_vocab"],
    )
    return NgramHash.from_config(released, real_data["token_map"], Path("config.json"))


def by_position(rows: Int64) -> Int64:
    """The golden files put positions first."""
    return rows.transpose(1, 0, 2)


def test_mini_constants_equal_the_reference(mini: NgramHash) -> None:
    golden = load_file(DATA / "mini_engram.safetensors")
    for name in ("primes", "offsets", "multipliers"):
        np.testing.assert_array_equal(getattr(mini, name), golden[name])
    assert mini.pad_class == golden["token_map"][golden["pad_id"][0]]


def test_released_constants_equal_the_reference(
    real: NgramHash, real_data: dict[str, npt.NDArray[np.int64]]
) -> None:
    for name in ("primes", "offsets", "multipliers"):
        np.testing.assert_array_equal(getattr(real, name), real_data[name])
    assert real.primes.reshape(2, -1).sum(axis=1).tolist() == [384006168, 384016682]


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_mini_rows_equal_the_reference_in_prefill_and_decode(mini: NgramHash, case: Path) -> None:
    with safe_open(case, "np") as tensors:
        prompt = tensors.get_tensor("prompt_ids")
        prefill = tensors.get_tensor("prefill.hash_ids")
        steps = tensors.get_tensor("decode.input_ids")
        decode = tensors.get_tensor("decode.hash_ids")
    np.testing.assert_array_equal(by_position(mini.rows(prompt)), prefill)
    sequence = np.concatenate([prompt, steps])
    for step in range(len(steps)):
        position = len(prompt) + step
        history = sequence[max(0, position - mini.reach) : position]
        rows = mini.rows(sequence[position : position + 1], history)
        np.testing.assert_array_equal(by_position(rows)[0], decode[step])


@pytest.mark.parametrize("text", range(5))
def test_released_rows_equal_the_reference(
    real: NgramHash, real_data: dict[str, npt.NDArray[np.int64]], text: int
) -> None:
    ids = real_data[f"{text}.ids"]
    np.testing.assert_array_equal(real.classes[ids], real_data[f"{text}.compressed"])
    np.testing.assert_array_equal(by_position(real.rows(ids)), real_data[f"{text}.hash_ids"])


@pytest.mark.parametrize("sizes", [(9,), (4, 5), (1,) * 9, (1, 2, 3, 3), (8, 1)])
def test_rows_do_not_depend_on_where_a_chunk_ends(real: NgramHash, sizes: tuple[int, ...]) -> None:
    tokens = np.array([671, 4787, 13769, 46012, 54994, 1060, 270, 41638, 6397])
    parts, begin = [], 0
    for size in sizes:
        history = tokens[max(0, begin - real.reach) : begin]
        parts.append(real.rows(tokens[begin : begin + size], history))
        begin += size
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), real.rows(tokens))


def test_short_prompts_do_not_all_look_up_padding(real: NgramHash) -> None:
    tokens = np.arange(1000, 1031)
    padding = real.rows([2] * 31)
    rows = real.rows(tokens)
    assert (rows != padding).mean() > 0.99
    assert len(np.unique(rows[0])) > 0.99 * rows[0].size


def test_every_row_is_inside_its_heads_share_of_the_table(real: NgramHash) -> None:
    rows = real.rows(np.random.default_rng(0).integers(0, 129280, 5000))
    ends = real.offsets + real.primes.reshape(2, -1)
    assert (rows >= real.offsets[:, None]).all()
    assert (rows < ends[:, None]).all()


def test_multipliers_survive_only_as_int64(mini: NgramHash) -> None:
    """A JSON reader that keeps doubles loses low bits: every row is then another valid one."""
    listed = json.dumps(mini.multipliers.tolist())
    trapped = replace(mini, multipliers=np.array(json.loads(listed, parse_int=float), np.int64))
    exact = replace(mini, multipliers=np.array(json.loads(listed), np.int64))
    with safe_open(CASES[-1], "np") as tensors:
        ids, golden = tensors.get_tensor("prompt_ids"), tensors.get_tensor("prefill.hash_ids")
    assert (by_position(trapped.rows(ids)) != golden).mean() > 0.5
    np.testing.assert_array_equal(by_position(exact.rows(ids)), golden)


def test_float_multipliers_raise_instead_of_hashing_to_other_rows(real: NgramHash) -> None:
    """The released ones fit a double, but their products with a class do not."""
    seen = real.classes[-1000:]
    in_float = (seen * real.multipliers[0, 0].astype(np.float64)).astype(np.int64)
    assert (in_float != seen * real.multipliers[0, 0]).mean() > 0.5
    with pytest.raises(TypeError):
        replace(real, multipliers=real.multipliers.astype(np.float64)).rows([5, 6, 7])
    assert real.multipliers.dtype == real.rows([5]).dtype == np.int64


@pytest.mark.parametrize("wrong", ["engram_vocab_size", "engram_n_heads"])
def test_a_table_of_another_size_than_the_primes_give_is_refused(
    config: ModelConfig, mini: NgramHash, wrong: str
) -> None:
    changed = replace(config, **{wrong: getattr(config, wrong) + 300})
    with pytest.raises(CheckpointError, match=r"config\.json: engram_num_embeddings states \d+"):
        NgramHash.from_config(changed, mini.classes, MINI / "config.json")


def test_an_id_outside_the_vocabulary_is_no_row(mini: NgramHash) -> None:
    for token in (-1, 512):
        with pytest.raises(IndexError, match=f"{token} is outside the vocabulary of 512"):
            mini.rows([3, token])


def test_primes_are_distinct_primes_above_the_floor() -> None:
    primes = table_primes(3, 2, 4, 1000).ravel().tolist()
    assert len(set(primes)) == len(primes) == 24
    assert all(p >= 999 and all(p % d for d in range(2, 40)) for p in primes)
    assert primes[:4] == [1009, 1013, 1019, 1021]


def test_a_model_without_engram_layers_has_no_multipliers() -> None:
    assert hash_multipliers((), 4, 100).shape == (0, 4)


def test_no_tokens_ask_for_no_rows(mini: NgramHash) -> None:
    assert mini.rows([]).shape == (2, 0, 6)
