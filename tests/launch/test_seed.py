"""The seed a person gives is the one tokens are drawn with, and no other seed of the engine's."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from launch import generate
from launch.options import GenerateOptions, GroupOptions
from tests.golden.cases import MINI


def test_the_seed_of_generate_reaches_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def keep(*ids: Any, **request: Any) -> GenerateOptions:
        seen.append(GenerateOptions(*ids, **request))
        return seen[-1]

    monkeypatch.setattr(generate, "GenerateOptions", keep)
    monkeypatch.setattr(generate, "run_foreground", lambda main: None)
    arguments = [str(MINI), "--prompt", "x", "--seed", "7"]
    result = CliRunner().invoke(generate.generate_command, arguments)
    assert result.exception is None, result.output
    assert seen[0].seed == 7
    assert GroupOptions(MINI).seed == 0
