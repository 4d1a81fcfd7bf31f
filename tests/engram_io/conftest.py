"""Fixtures of the engram tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engram_io.table_on_disk import TableOnDisk, write_table


@pytest.fixture
def on_disk(tmp_path: Path) -> TableOnDisk:
    """A table on disk whose every byte is known."""
    return write_table(tmp_path)
