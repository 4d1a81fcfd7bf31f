"""Where what belongs to a user lies: settings, kept states, notes, and a command's sockets."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from protocol.errors import ResourceError


def user_directory(variable: str, below: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The part of headrace in what `variable` names, or in `below` of the home directory."""
    return Path(environment.get(variable) or _home(environment) / below) / "headrace"


def _home(environment: Mapping[str, str]) -> Path:
    """A user who has none, as in many a container, has the one that such a container gives."""
    home = environment.get("HOME") or os.path.expanduser("~")
    return Path("/" if home == "~" else home)


def temporary_directory() -> Path:
    """Where files go that end with the command. Raises ResourceError where there is none."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise ResourceError(
            "no directory for temporary files can be written; name one in TMPDIR"
        ) from None
