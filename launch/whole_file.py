"""Files that a person keeps: written whole, or left as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """UTF-8 text for `path`, there once all is written: a full disk or Ctrl-C leaves what was there
    before. A device or a pipe is written as it comes. Raises OSError."""
    target = path.resolve()
    beside = target.with_name(f"{target.name}.partial")
    partial = beside if target.is_file() or not target.exists() else target
    try:
        with partial.open("w", encoding="utf-8", errors="replace") as file:
            yield file
        if partial is beside:
            os.replace(beside, target)
    finally:
        if partial is beside:
            beside.unlink(missing_ok=True)
