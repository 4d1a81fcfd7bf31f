"""A child ends with its parent, and says one line when it ends with an error."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.specs import EngramServiceSpec, ReaderSpec
from protocol.wire import Message

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 20.0
READER = ReaderSpec(0, 0, 1, "", "", [], 0, 0, False, 0.0, 0.0, 0.0, "", "")
ENGRAM = EngramServiceSpec("", "", "", 0, 1, 0, False, 0.0, 0.0, "", "")

CHILD = """
import sys
from protocol.errors import CheckpointError
from protocol.lifecycle import run_child
from protocol.specs import ReaderSpec

def serve(spec):
    print("serving", flush=True)
    match {behaviour!r}:
        case "error": raise CheckpointError("shard 2: is broken")
        case "bug": [][1]
        case "panic": raise BaseException("pool: ThreadPoolBuildError {{ kind: IOError }}")
        case "wait":
            import signal
            signal.pause()

if {behaviour!r} == "few threads":
    import resource, threading
    threading.stack_size(1 << 28)
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 3 * (1 << 27),) * 2)
run_child(ReaderSpec, serve)
"""
NO_THREAD = "error: no further process or thread can be started; raise the limit (ulimit"


class Started:
    """A child of this process that runs CHILD; `pipe` is the end that a parent holds."""

    def __init__(self, behaviour: str, parent: int | None = None, **environment: str) -> None:
        receiving, self.pipe = os.pipe()
        program = CHILD.format(behaviour=behaviour)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(receiving), str(parent or os.getpid())],
            pass_fds=[receiving],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            text=True,
        )
        os.close(receiving)

    def send(self, data: bytes) -> None:
        os.write(self.pipe, data)

    def spec(self, spec: Message) -> None:
        frame = spec.encode()
        self.send(len(frame).to_bytes(4, "little") + frame)

    def await_serving(self) -> None:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0]
        assert self.process.stdout.readline() == "serving\n"

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said


def test_it_serves_with_its_spec_and_ends_well() -> None:
    child = Started("return")
    child.spec(READER)
    assert child.end() == (0, "")


def test_a_foreseen_error_is_one_line_and_its_exit_code() -> None:
    child = Started("error")
    child.spec(READER)
    assert child.end() == (3, "error: shard 2: is broken\n")


def test_an_unforeseen_error_is_one_line_with_its_place() -> None:
    child = Started("bug")
    child.spec(READER)
    code, said = child.end()
    assert code == 1 and said.count("\n") == 1
    assert (
        said.startswith("error: internal error: IndexError")
        and "<string>" in said
        and "Traceback" not in said
    )


def test_the_traceback_is_there_for_who_asks() -> None:
    child = Started("bug", HEADRACE_DEBUG="1")
    child.spec(READER)
    assert "Traceback" in child.end()[1]


@pytest.mark.parametrize("behaviour", ["panic", "few threads"])
def test_threads_that_cannot_be_started_end_the_process_within_a_library(behaviour: str) -> None:
    child = Started(behaviour)
    child.spec(READER)
    code, said = child.end()
    assert code == 4 and said.startswith(NO_THREAD) and said.count("\n") == 1


@pytest.mark.parametrize(
    "module, code, complaint",
    [
        ("raise ImportError('libx.so: failed to map segment from shared object')", 4, "memory"),
        ("import nothing_of_that_name", 1, "internal error: ModuleNotFoundError"),
    ],
)
def test_a_module_that_cannot_be_loaded_prints_a_traceback(
    tmp_path: Path, module: str, code: int, complaint: str
) -> None:
    (tmp_path / "short_of_room.py").write_text(module)
    ended = subprocess.run(
        [sys.executable, "-m", "protocol", "short_of_room", "3", "4"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == code and ended.stderr.startswith(f"error: {complaint}")
    assert ended.stderr.count("\n") == 1


def test_it_ends_when_its_parents_pipe_closes() -> None:
    child = Started("wait")
    child.spec(READER)
    child.await_serving()
    os.close(child.pipe)
    assert child.end() == (1, "")


def test_ctrl_c_is_the_parents_to_handle() -> None:
    child = Started("wait")
    child.spec(READER)
    child.await_serving()
    child.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        child.process.wait(0.3)
    child.process.kill()
    child.end()


@pytest.mark.parametrize(
    "data, complaint",
    [
        ((1 << 31).to_bytes(4, "little"), "start message of 2147483648 bytes"),
        ((3).to_bytes(4, "little") + b"\x01\x02\x03", "start message: "),
        ((0).to_bytes(4, "little"), "start message: a frame of 0 bytes"),
    ],
)
def test_a_malformed_start_message_is_said(data: bytes, complaint: str) -> None:
    child = Started("return")
    child.send(data)
    code, said = child.end()
    assert code == 1 and said.startswith(f"error: {complaint}") and said.count("\n") == 1


def test_another_childs_start_message_is_said() -> None:
    child = Started("return")
    child.spec(ENGRAM)
    assert child.end() == (1, "error: start message is EngramServiceSpec, expected ReaderSpec\n")


def test_a_parent_that_dies_in_the_start_is_noticed() -> None:
    child = Started("return")
    os.close(child.pipe)
    assert child.end() == (1, "error: the parent ended before its start message\n")


def test_a_parent_that_died_before_the_start_leaves_no_orphan() -> None:
    child = Started("wait", parent=1 << 22)
    child.spec(READER)
    assert child.end() == (1, "")


def test_a_person_who_starts_a_child_is_told_what_to_start() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "protocol", "expert_io.reader"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        "error: headrace starts this module, not a person; see headrace --help\n"
    )
