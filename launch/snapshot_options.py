"""Options of the commands that keep conversations on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launch.options import BOUNDS, GIB
from launch.ranges import PATH, Size
from launch.user_directories import user_directory


def default_snapshot_dir() -> Path:
    """The user's own cache."""
    return user_directory("XDG_CACHE_HOME", ".cache") / "states"


def with_snapshot_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--snapshot-dir` and `--snapshot-bytes`, which become part of GroupOptions."""
    function = click.option(
        "--snapshot-bytes",
        type=Size(*BOUNDS["snapshot_bytes"]),
        default=f"{4 * GIB}",
        show_default="4GiB",
        metavar="SIZE",
        help="Disk for sequence states that survive a restart; they hold what was said. 0: none.",
    )(function)
    return click.option(
        "--snapshot-dir",
        type=PATH,
        default=default_snapshot_dir,
        show_default="~/.cache/headrace/states",
        help="Where they are kept.",
    )(function)
