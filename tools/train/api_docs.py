"""Prose out of what packages document in code: service models, docstrings, comments, manual pages.

Owns one reader for each such form. Each gives, for every file in order of name, the file's name and
its blocks (is it a heading, the text), as the reader of HTML pages does; what counts as prose is
decided elsewhere.
"""

from __future__ import annotations

import gzip
import html
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Block = tuple[bool, str]
Blocks = list[Block]
Reader = Callable[[Path], Iterator[tuple[str, Blocks]]]

_BLOCK_TAG = re.compile(r"</?(?:p|li|ul|ol|dl|dt|dd|br|note|important|h[1-6]|div|pre)\b[^>]*>")
_TAG = re.compile(r"<[^>]+>")
_SPACES = re.compile(r"\s+")
_BLANK_LINE = re.compile(r"\n\s*\n")
_FIELD = re.compile(r"^\s*:[a-z]+[^:\n]*:", re.MULTILINE)
_BULLET = re.compile(r"^\s*(?:\* |- )", re.MULTILINE)
_CLASS_OR_DOCSTRING = re.compile(r'^class (\w+)|"""(.*?)"""', re.MULTILINE | re.DOTALL)
_ACCESSOR = re.compile(
    r"^\s*(?:\*\*\[Required\]\*\* )?(?:Gets|Sets) the \w+ of this \w+\.\s*", re.MULTILINE
)
_GENERATED = re.compile(
    r"The value to assign to|Initializes a new|Allowed values for this|This constant can be used"
    r"|The \w+ of this \w+\.$"
)
_MARKUP = re.compile(r"\b[A-Z]{1,4}\(([^()]*)\)")
_ANSIBLE = re.compile(
    r"""^(?:DOCUMENTATION|RETURN) = r?(?:'''|\"\"\")(.*?)(?:'''|\"\"\")""", re.M | re.S
)
_KEY = re.compile(r"^\s*(?:- +)?[\w ]+:(?: +[|>][-+]?)?(?=\s|$)|^\s*- ", re.MULTILINE)
_COMMENT = re.compile(r"/\*(.*?)\*/|((?:^[ \t]*//[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
_COMMENT_EDGE = re.compile(r"^[ \t]*(?:\*+|//+!?) ?", re.MULTILINE)
_ITEM = re.compile(r"^\s*(?:@\w+:|[-*o] |\d+[.)] )", re.MULTILINE)
_LICENCE = re.compile(r"[Cc]opyright|SPDX|redistribut|WARRANT|\(c\)")
SOURCE_FILES = {".c", ".h", ".cc", ".cpp", ".hpp", ".go"}
_POD_CODE = re.compile(r"[A-Z]<(?:< )?(?:[^<>|]*\|)?([^<>]*?)(?: >)?>")


def plain(text: str) -> str:
    """One line of text without markup of HTML."""
    return _SPACES.sub(" ", html.unescape(_TAG.sub("", text))).strip()


def _paragraphs(texts: Iterable[str]) -> Iterator[Block]:
    for text in texts:
        if line := plain(text):
            yield False, line


def _members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as file:
        for name in sorted(filter(wanted, file.namelist())):
            yield name, file.read(name)


def _descriptions(value: Any, key: str) -> Iterator[str]:
    """Every string under `key` at any depth, in order."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key and isinstance(inner, str):
                yield inner
            else:
                yield from _descriptions(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _descriptions(inner, key)


def service_models(archive: Path) -> Iterator[tuple[str, Blocks]]:
    """botocore: operations and shapes of the newest model of each service, in HTML fragments."""
    newest: dict[str, str] = {}
    with zipfile.ZipFile(archive) as file:
        for name in sorted(n for n in file.namelist() if n.endswith("/service-2.json.gz")):
            newest[name.split("/")[2]] = name
    chosen = set(newest.values())
    for name, data in _members(archive, chosen.__contains__):
        model = json.loads(gzip.decompress(data))
        blocks: Blocks = []
        for part in ("operations", "shapes"):
            for title, item in model[part].items():
                blocks.append((True, title))
                for text in _descriptions(item, "documentation"):
                    blocks += _paragraphs(_BLOCK_TAG.split(text))
        yield name, blocks


def discovery_documents(archive: Path) -> Iterator[tuple[str, Blocks]]:
    """google-api-python-client: methods and schemas of every service."""
    for name, data in _members(archive, lambda n: "/documents/" in n and n.endswith(".json")):
        model = json.loads(data)
        blocks: Blocks = []
        for part in ("resources", "schemas"):
            for title, item in model.get(part, {}).items():
                blocks.append((True, title))
                for text in _descriptions(item, "description"):
                    blocks += _paragraphs(_BULLET.sub("\n", text).split("\n"))
        yield name, blocks


def docstrings(archive: Path) -> Iterator[tuple[str, Blocks]]:
    """Python modules: a class is a heading, the fields of every docstring in it are paragraphs."""
    for name, data in _members(archive, lambda n: n.endswith(".py")):
        blocks: Blocks = []
        for title, text in _CLASS_OR_DOCSTRING.findall(data.decode("utf-8", "replace")):
            if title:
                blocks.append((True, title))
            else:
                items = _BULLET.sub("\n\n", _FIELD.sub("\n\n", _ACCESSOR.sub("", text)))
                blocks += (
                    block
                    for block in _paragraphs(_BLANK_LINE.split(items))
                    if not _GENERATED.match(block[1])
                )
        yield name, blocks


def modules_of_ansible(archive: Path) -> Iterator[tuple[str, Blocks]]:
    """ansible: the items of every plugin's DOCUMENTATION and RETURN, taken line by line."""
    for name, data in _members(archive, lambda n: n.endswith(".py") and "/plugins/" in n):
        blocks: Blocks = [(True, Path(name).stem)]
        for document in _ANSIBLE.findall(data.decode("utf-8", "replace")):
            items = _KEY.sub("\n\n", _MARKUP.sub(r"\1", document))
            blocks += _paragraphs(item.strip().strip("'\"") for item in _BLANK_LINE.split(items))
        yield name, blocks


def pods(directory: Path) -> Iterator[tuple[str, Blocks]]:
    """Perl's manual pages: paragraphs that are not indented, under `=head` lines."""
    for path in sorted(directory.rglob("*.pod")):
        blocks: Blocks = []
        for text in _BLANK_LINE.split(path.read_text("utf-8", "replace")):
            text = _POD_CODE.sub(r"\1", _POD_CODE.sub(r"\1", text))
            if text.startswith("=head"):
                blocks.append((True, plain(text.partition(" ")[2])))
            elif text and not text[0].isspace() and text[0] != "=":
                blocks.append((False, _SPACES.sub(" ", text).strip()))
        yield str(path.relative_to(directory)), blocks


def comments(directory: Path) -> Iterator[tuple[str, Blocks]]:
    """Comments of C, C++ and Go sources, in `directory` itself or in the one archive inside it."""
    archives = sorted(directory.rglob("*.tar.xz"))
    files = _files_of_archive(archives[0]) if archives else _files(directory)
    for name, data in files:
        blocks: Blocks = []
        for wide, lines in _COMMENT.findall(data.decode("utf-8", "replace")):
            text = wide or lines
            if not _LICENCE.search(text):
                items = _ITEM.sub("\n\n", _COMMENT_EDGE.sub("", text))
                blocks += (
                    (False, _SPACES.sub(" ", item).strip()) for item in _BLANK_LINE.split(items)
                )
        yield name, blocks


def _files(directory: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(directory.rglob("*")):
        if path.suffix in SOURCE_FILES and path.is_file() and not path.is_symlink():
            yield str(path.relative_to(directory)), path.read_bytes()


def _files_of_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path, "r|xz") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None and Path(member.name).suffix in SOURCE_FILES:
                yield member.name, file.read()
