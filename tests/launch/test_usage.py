"""Symptoms: a slip on the command line is answered by a paragraph, or by nothing to do next."""

from __future__ import annotations

import sys

import pytest

from launch import cli


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("genrate", "no such command 'genrate'. Did you mean 'generate'?; see headrace --help"),
        ("generate", "missing argument 'DIR'; see headrace generate --help"),
        ("generate DIR --foo", "no such option '--foo'; see headrace generate --help"),
        (
            "generate DIR --readers many",
            "invalid value for '--readers': 'many' is not a valid integer; see headrace generate "
            "--help",
        ),
        ("generate DIR --readers", "option '--readers' requires an argument; see headrace --help"),
        (
            "bench io DIR more",
            "got unexpected extra argument (more); see headrace bench io --help",
        ),
        ("serve DIR --pin maybe", "'maybe' is not one of 'auto', 'on', 'off'; see headrace serve"),
    ],
)
def test_a_slip_is_answered_by_more_than_a_line(
    arguments: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments.split()])
    assert cli._run() == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("headrace: ") and said in printed.err


def test_no_command_at_all_is_answered_by_no_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace"])
    assert cli._run() == 2
    assert "headrace generate DIR" in capsys.readouterr().err
