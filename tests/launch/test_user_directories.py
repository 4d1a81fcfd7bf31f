"""Users without a home, and machines without a place for temporary files."""

from __future__ import annotations

import pwd
import tempfile
from pathlib import Path
from typing import Any

import pytest

from launch.snapshot_options import default_snapshot_dir
from launch.user_directories import temporary_directory, user_directory
from protocol.errors import ResourceError


def _missing(*_: Any) -> Any:
    raise KeyError("no such user")


def test_a_user_without_a_home_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", _missing)
    assert default_snapshot_dir() == Path("/.cache/headrace/states")


def test_a_directory_of_its_own_goes_before_the_home() -> None:
    environment = {"HOME": "/home/a", "XDG_STATE_HOME": "/b"}
    assert user_directory("XDG_STATE_HOME", ".local/state", environment) == Path("/b/headrace")
    assert user_directory("XDG_CACHE_HOME", ".cache", environment) == Path(
        "/home/a/.cache/headrace"
    )


def test_no_place_for_temporary_files_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(ResourceError, match="TMPDIR"):
        temporary_directory()
