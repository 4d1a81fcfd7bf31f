"""Every reader finds the prose of its form and nothing else, and no file is on both sides."""

from __future__ import annotations

import gzip
import json
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from tools.train.api_docs import (
    Blocks,
    comments,
    discovery_documents,
    docstrings,
    modules_of_ansible,
    pods,
    service_models,
)
from tools.train.corpus import LONG_DOCUMENT, documents
from tools.train.sources import Source


def wheel(path: Path, **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def texts(blocks: Blocks) -> list[str]:
    return [text for _, text in blocks]


def test_only_the_newest_model_of_a_service_is_read(tmp_path: Path) -> None:
    def model(text: str) -> bytes:
        operation = {"documentation": f"<p>{text} &amp; <code>Tag</code>.</p><p>More.</p>"}
        return gzip.compress(json.dumps({"operations": {"Put": operation}, "shapes": {}}).encode())

    archive = wheel(
        tmp_path / "a.whl",
        **{
            "botocore/data/sqs/2011-01-01/service-2.json.gz": model("Old"),
            "botocore/data/sqs/2012-01-01/service-2.json.gz": model("New"),
        },
    )
    ((name, blocks),) = service_models(archive)
    assert "2012" in name
    assert blocks == [(True, "Put"), (False, "New & Tag."), (False, "More.")]


def test_nested_descriptions_of_a_discovery_document_are_found(tmp_path: Path) -> None:
    schema = {"description": "Outer.", "properties": {"a": {"description": "Inner.\n* Item."}}}
    data = json.dumps({"schemas": {"Thing": schema}}).encode()
    ((_, blocks),) = discovery_documents(wheel(tmp_path / "a.whl", **{"x/documents/a.json": data}))
    assert texts(blocks) == ["Thing", "Outer.", "Inner.", "Item."]


def test_generated_sentences_of_docstrings_are_left_out(tmp_path: Path) -> None:
    code = b'''class Queue:
    """
    Gets the name of this Queue.
    A name that people read.

    :param str name:
        The value to assign to the name property.
    :return: What was found.
    """
'''
    ((_, blocks),) = docstrings(wheel(tmp_path / "a.whl", **{"oci/queue.py": code}))
    assert texts(blocks) == ["Queue", "A name that people read.", "What was found."]


def test_keys_and_markup_of_ansible_documentation_are_left_out(tmp_path: Path) -> None:
    code = b'''DOCUMENTATION = r"""
module: copy
options:
  path:
    description:
      - The file to write, see
        M(ansible.builtin.file).
    type: str
"""
EXAMPLES = """
- name: not this
"""
'''
    name = "ansible_collections/a/b/plugins/modules/copy.py"
    ((_, blocks),) = modules_of_ansible(wheel(tmp_path / "a.whl", **{name: code}))
    assert "The file to write, see ansible.builtin.file." in texts(blocks)
    assert not any("not this" in text or "description" in text for text in texts(blocks))


def test_code_of_manual_pages_is_left_out(tmp_path: Path) -> None:
    page = "=head1 NAME\n\nA C<file> and L<perlop|a page>.\n\n    print 1;\n\n=cut\n"
    (tmp_path / "a.pod").write_text(page)
    ((_, blocks),) = pods(tmp_path)
    assert blocks == [(True, "NAME"), (False, "A file and a page.")]


SOURCE = b"""/* Copyright of someone. */
int url = "http://x";
/**
 * open_it - Opens what is
 * closed.
 * @how: In which way.
 */
// One more
// remark.
"""


@pytest.mark.parametrize("packed", [False, True])
def test_comments_are_read_without_their_edges_and_licences(tmp_path: Path, packed: bool) -> None:
    if packed:
        with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as archive:
            member = tarfile.TarInfo("src/a.c")
            member.size = len(SOURCE)
            archive.addfile(member, BytesIO(SOURCE))
    else:
        (tmp_path / "a.c").write_bytes(SOURCE)
    ((name, blocks),) = comments(tmp_path)
    assert name.endswith("a.c")
    found = [text for text in texts(blocks) if text]
    assert found == ["open_it - Opens what is closed.", "In which way.", "One more remark."]


def test_a_long_file_is_cut_and_stays_on_one_side(tmp_path: Path) -> None:
    for file in range(30):
        paragraphs = [
            f"=head1 Part {part}\n\n"
            + f"File {'x' * (file % 6 + 1)} {'z' * (file // 6 + 1)} says {'y' * part}. " * 90
            for part in range(1, 6)
        ]
        (tmp_path / f"{file}.pod").write_text("\n\n".join(paragraphs))
    found = list(documents(Source("p", "none", "pods"), tmp_path, set()))
    sides: dict[str, set[bool]] = {}
    for document in found:
        sides.setdefault(document.name.partition("#")[0], set()).add(document.held_out)
        assert len(document.text) < 2 * LONG_DOCUMENT
    assert len(found) > len(sides) == 30
    assert all(len(side) == 1 for side in sides.values())
