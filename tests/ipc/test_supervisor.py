"""Symptoms: Ctrl-C that hangs or leaves processes, sockets or memory behind; a death that nobody
names; orphans of a killed supervisor; two instances in each other's way. All as command lines."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.child import spawn_child
from protocol.errors import UsageError
from protocol.messages import Hello, Stop
from tests.ipc.running_group import (
    END_S,
    MINI,
    MINIMUM_SLOTS,
    PATIENCE_S,
    REPOSITORY,
    Command,
    children_of,
    killed,
)

LONG_PROMPT = ",".join(str(3 + i % 490) for i in range(300))
ENDLESS = ("--prompt-ids", "0,5,6,7", "--max-tokens", "30000", "--ignore-eos")
MODULES = {
    "experts": "expert_io.service",
    "engram": "engram_io.service",
    "compute": "compute.process",
    "reader-0": "expert_io.reader",
}


def generate(*arguments: str, checkpoint: Path = MINI, runtime_dir: Path | None = None) -> Command:
    small = ("--slots", str(MINIMUM_SLOTS), "--readers", "1", "--threads", "1")
    return Command("generate", str(checkpoint), *small, *arguments, runtime_dir=runtime_dir)


def in_start(command: Command) -> None:
    command.await_line("compute: dense weights")


def in_prefill(command: Command) -> None:
    command.await_line("ready in")


def in_decode(command: Command) -> None:
    command.await_text()


@pytest.mark.parametrize("name", ["experts", "engram", "compute"])
def test_a_death_is_not_named_or_leaves_the_others_running(name: str) -> None:
    with generate(*ENDLESS) as command:
        in_decode(command)
        command.look()
        killed(command.children[MODULES[name]])
        code, took = command.end()
        assert (code, took < END_S) == (5, True), (code, took)
        (line,) = command.said()
        # Nothing says that memory was short.
        assert line == f"headrace: {name} ended: killed by SIGKILL"
        command.nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("phase", "work"),
    [
        (in_start, ENDLESS),
        (in_prefill, ("--prompt-ids", LONG_PROMPT, "--chunk-tokens", "4")),
        (in_decode, ENDLESS),
    ],
    ids=["start", "prefill", "decode"],
)
def test_an_interrupt_takes_long_or_leaves_something(
    phase: object, work: tuple[str, ...], number: signal.Signals
) -> None:
    assert callable(phase)
    with generate(*work) as command:
        phase(command)
        command.look()
        # As a terminal does: to all of the process group.
        os.killpg(command.process.pid, number)
        code, took = command.end()
        assert (code, took < END_S) == (128 + number, True), (code, took)
        assert command.said() == []
        command.nothing_left()


def test_an_interrupt_while_children_load_their_modules_prints_tracebacks() -> None:
    with generate(*ENDLESS) as command:
        # Compute, which loads torch, is far from that.
        command.await_line("reader-0: ready")
        os.killpg(command.process.pid, signal.SIGINT)
        code, took = command.end()
        assert (code, took < END_S) == (130, True), (code, took)
        assert not [line for line in command.lines if "KeyboardInterrupt" in line]
        assert list(command.runtime.iterdir()) == []


def test_a_child_that_cannot_be_watched_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", too_many)
    before = children_of(os.getpid())
    with pytest.raises(OSError, match="Too many"):
        spawn_child("expert_io.reader", Stop(), (), "reader-0")
    assert children_of(os.getpid()) == before


def test_an_option_that_no_message_carries_is_an_internal_error() -> None:
    before = children_of(os.getpid())
    with pytest.raises(UsageError, match=r"^engram cannot be started with these options: "):
        spawn_child("engram_io.service", Hello("\udcff", 1, 0), (), "engram")
    assert children_of(os.getpid()) == before


def test_a_closed_terminal_leaves_something() -> None:
    with generate(*ENDLESS) as command:
        in_start(command)
        command.look()
        command.process.send_signal(signal.SIGHUP)
        code, took = command.end()
        assert (code, took < END_S) == (128 + signal.SIGHUP, True), (code, took)
        command.nothing_left()


@pytest.mark.parametrize("phase", [in_start, in_decode], ids=["start", "decode"])
def test_a_second_interrupt_stops_the_clearing_away(phase: Callable[[Command], None]) -> None:
    with generate(*ENDLESS) as command:
        phase(command)
        command.look()
        os.kill(command.children[MODULES["experts"]], signal.SIGSTOP)
        for _ in range(3):
            command.process.send_signal(signal.SIGINT)
            # Until the group is told to stop: its own processes end then, all but the stopped one.
            time.sleep(0.05)
        code, took = command.end()
        assert (code, took < END_S) == (130, True), (code, took)
        command.nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_of_a_benchmark_leaves_its_directory(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = ["bench", "io", str(MINI), "--rounds", "9999", "--round", "1MiB", "--readers", "1"]
    with subprocess.Popen(
        [sys.executable, "launch.py", *command],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as bench:
        assert bench.stderr is not None
        assert bench.stderr.readline().startswith("round ")
        for _ in range(3):
            bench.send_signal(number)
            # Until the first one is heeded, which the second would otherwise be one with.
            time.sleep(0.005)
        _, said = bench.communicate(timeout=PATIENCE_S)
        assert bench.returncode == 128 + number
    assert not [line for line in said.splitlines() if not line.startswith("round ")]
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_child_holds_up_the_end() -> None:
    with generate(*ENDLESS) as command:
        in_decode(command)
        command.look()
        for module in (MODULES["experts"], MODULES["compute"]):
            os.kill(command.children[module], signal.SIGSTOP)
        command.process.send_signal(signal.SIGTERM)
        code, took = command.end()
        assert (code, took < END_S) == (128 + signal.SIGTERM, True), (code, took)
        command.nothing_left()


def test_a_group_that_was_stopped_as_a_whole_ends_when_it_goes_on() -> None:
    """Ctrl-Z and `fg`, as long apart as a silence may take, twice."""
    with generate(*ENDLESS, "--silence-timeout", "1.5") as command:
        in_decode(command)
        command.look()
        for _ in range(2):
            os.killpg(command.process.pid, signal.SIGSTOP)
            # Nothing happens meanwhile that could be awaited.
            time.sleep(1.6)
            os.killpg(command.process.pid, signal.SIGCONT)
            command.await_text()
        command.process.send_signal(signal.SIGINT)
        code, took = command.end()
        assert (code, took < END_S) == (130, True), (code, took, command.lines)
        assert command.said() == []
        command.nothing_left()


def test_a_killed_supervisor_leaves_orphans_or_its_directory(tmp_path: Path) -> None:
    with generate(*ENDLESS, runtime_dir=tmp_path) as command:
        in_decode(command)
        command.look()
        (stale,) = tmp_path.iterdir()
        command.process.kill()
        command.end()
        # The directory of a process that could not clean up goes at the next start.
        (left,) = tmp_path.iterdir()
        assert left == stale
        with generate(
            "--prompt-ids", "0,5", "--max-tokens", "1", runtime_dir=tmp_path
        ) as following:
            assert following.end()[0] == 0
        command.nothing_left()


def test_children_outlive_a_killed_supervisor_for_long() -> None:
    with generate(*ENDLESS) as command:
        in_decode(command)
        command.look()
        assert len(command.children) == 4
        command.process.kill()
        shutil.rmtree(command.runtime)
        command.runtime.mkdir()
        command.nothing_left(within=END_S)


def test_two_instances_meet(tmp_path: Path) -> None:
    """The same runtime directory and checkpoint at once, and neither sweeps the other away."""
    request = ("--prompt-ids", "0,5,6,7", "--max-tokens", "8")
    with (
        generate(*request, runtime_dir=tmp_path) as one,
        generate(*request, runtime_dir=tmp_path) as other,
    ):
        texts = []
        for command in (one, other):
            assert command.process.stdout is not None
            texts.append(command.process.stdout.read())
            assert command.end()[0] == 0, command.lines
        assert texts[0] == texts[1] != b""
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_closes_its_end_of_the_text_gets_a_complaint() -> None:
    """`headrace generate … | head -c 1`."""
    with generate(*ENDLESS) as command:
        in_decode(command)
        command.look()
        assert command.process.stdout is not None
        command.process.stdout.close()
        command.end()
        assert command.said() == []
        command.nothing_left()


def test_an_error_of_one_child_at_its_start_is_said_twice_or_not_at_all(tmp_path: Path) -> None:
    """A tokenizer of another revision, which only the engram service can see."""
    checkpoint = Path(shutil.copytree(MINI, tmp_path / "mini"))
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["added_tokens"][-1]["content"] = tokenizer["added_tokens"][-2]["content"].upper()
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with generate("--prompt-ids", "0,5", checkpoint=checkpoint) as command:
        code, _ = command.end()
        assert code == 3
        about = [line for line in command.lines if "tokenizer.json" in line]
        assert len(about) == 1 and about[0].startswith("headrace: "), command.lines
        assert "classes" in about[0] and command.lines[-1] == about[0]
        assert list(command.runtime.iterdir()) == []


def test_a_start_without_end_is_not_named() -> None:
    with generate("--prompt-ids", "0,5", "--start-timeout", "0.1") as command:
        begin = time.monotonic()
        code, _ = command.end()
        assert code == 6 and time.monotonic() - begin < PATIENCE_S / 2
        assert command.lines[-1].startswith("headrace: start of compute, engram, experts, reader-0")
        assert "no answer within 0.1 s" in command.lines[-1]
        assert list(command.runtime.iterdir()) == []
