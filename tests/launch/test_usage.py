"""Symptoms: a slip on the command line is answered by a paragraph, or by nothing to do next."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import cli

ROOT = Path(__file__).parents[2]
MINI = ROOT / "tests" / "golden" / "data" / "mini"
Refused = Callable[..., tuple[str, str]]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """What a command line of these words, which is wrong usage, prints: output and errors."""

    def run(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["headrace", *words])
        assert cli._run() == 2
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


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
        ("check @", "invalid value for 'DIR': the name is empty; see headrace check --help"),
        ("generate DIR --runtime-dir @", "'--runtime-dir': the name is empty"),
        ("--config @ serve DIR", "'--config': the name is empty; see headrace --help"),
        ("chat DIR --warm-dir @", "'--warm-dir': the name is empty"),
        ("serve DIR --cache @", "invalid value for '--cache': '' is not a size"),
        ("serve DIR --readers ٣", "'--readers': '٣' is not a valid integer"),
        ("serve DIR --stall-timeout ٣", "'--stall-timeout': '٣' is not a valid number"),
        ("bench io DIR --rounds 1_0", "'--rounds': '1_0' is not a valid integer"),
        ("serve DIR --disk-bandwidth 0.5e9", "'--disk-bandwidth': '0.5e9' is not a size"),
        ("serve DIR --pin-experts 3", "'--pin-experts': '3' is not LAYER:EXPERT or LAYER:FIRST"),
        (f"serve DIR --keep {'9' * 200}", f"'--keep': '{'9' * 80}…'"),
        (f"serve DIR --queue {'9' * 5000}", f"'--queue': '{'9' * 80}…'"),
        ("serve DIR --slots -1", "-1 is not in the range 0<=x<="),
        ("generate DIR --readers 0", "0 is not in the range 1<=x<=256"),
        ("serve DIR --port 70000", "70000 is not in the range 0<=x<=65535"),
        ("serve DIR --config F", "as in headrace --config FILE serve DIR; see headrace serve"),
        ("options --config F", "as in headrace --config FILE serve DIR; see headrace serve"),
        ("options --queue 2.5", "'--queue': '2.5' is not a valid integer; see headrace serve"),
        ("generate DIR --device-cache 9999999TiB", "'--device-cache': 9999999TiB is not from 0 to"),
        ("bench io DIR --readers 0", "0 is not in the range 1<=x<=256"),
        ("bench io DIR --piece 0", "0 is not from 4096 to 1073741824 bytes"),
        ("bench group DIR --threads 0", "0 is not in the range 1<=x<=1024"),
        ("bench decode DIR --missing nan", "nan is not a finite number"),
        ("bench prefill DIR --tokens 0", "0 is not in the range 1<=x<="),
        ("simulate X --latency inf", "inf is not in the range 0.0<=x<=3600.0"),
        ("simulate X --bandwidth 0", "0 is not from 1 to"),
        ("synth DIR --seed -1", "-1 is not in the range"),
        ("synth DIR --vocab 9999999999999999999999", "is not in the range"),
        ("fit DIR X --rank 0", "0 is not in the range"),
        ("serve DIR --pin maybe", "'maybe' is not one of 'auto', 'on', 'off'; see headrace serve"),
    ],
)
def test_a_slip_is_answered_by_more_than_a_line(
    arguments: str, said: str, refused: Refused
) -> None:
    # An empty word is written @ here.
    output, errors = refused(*("" if word == "@" else word for word in arguments.split()))
    assert output == "" and errors.count("\n") == 1
    assert errors.startswith("headrace: ") and said in errors


def test_a_bad_value_from_elsewhere_is_looked_for_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('readers = "many"')
    monkeypatch.setenv("HEADRACE_CACHE", "17q")
    said = {}
    for where, words in {"environment": [], "file": ["--config", str(file)]}.items():
        _, said[where] = refused(*words, "generate", "DIR")
        monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    assert "'--cache': '17q' is not a size" in said["environment"]
    assert "(from environment HEADRACE_CACHE); see" in said["environment"]
    assert f"'many' is not a valid integer (from file {file}); see" in said["file"]


def test_a_limit_that_is_checked_later_is_looked_for_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("device = 'tpu'\ncache = '5'")

    def said(*words: str) -> str:
        return refused(*words)[1].strip()

    environment = "; --host is from environment HEADRACE_HOST"
    monkeypatch.setenv("HEADRACE_HOST", "0.0.0.0")
    assert said("serve", "DIR").endswith(environment)
    config = ("--config", str(file))
    assert said(*config, "serve", "DIR").endswith(f"of many; --device is from file {file}")
    assert said(*config, "serve", "DIR", "--device", "x").endswith("cuda:N for one of many")
    assert said(*config, "generate", str(MINI), "--prompt-ids", "3", "--device", "cpu").endswith(
        f"; --cache is from file {file}"
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_while_libraries_load_ends_with_its_code(
    number: signal.Signals, code: int
) -> None:
    early = f"""
import os, sys
from launch.entry import main
class Early:
    def find_spec(self, name, path=None, target=None):
        if name == "launch.cli":
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Early())
main()
"""
    ended = subprocess.run([sys.executable, "-c", early], cwd=ROOT, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (code, b"")


def test_no_command_at_all_is_answered_by_no_help(refused: Refused) -> None:
    _, errors = refused()
    assert "headrace generate DIR" in errors
