"""What the engram process does when its disk, its checkpoint or its parent fails."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engram_io.reader import ATTEMPTS
from protocol.messages import EngramFailed, EngramReady
from tests.ipc.engram_process import MINI, TIMEOUT_S, EngramProcess

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the mini checkpoint that a test may damage."""
    return Path(shutil.copytree(MINI, tmp_path / "mini"))


def shard_of(checkpoint: Path, tensor: str) -> Path:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    return checkpoint / str(index["weight_map"][tensor])


def test_a_thread_that_cannot_be_started_leaves_a_request_without_an_answer() -> None:
    with EngramProcess() as engram:
        pid = engram.process.pid
        taken = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        # Too little for a thread's stack.
        resource.prlimit(pid, resource.RLIMIT_AS, (taken + (4 << 20),) * 2)
        engram.ask(0, [5, 6])
        assert engram.answers(0) == [EngramReady(0, 0), EngramReady(0, 1)]


def test_an_io_error_that_passes_is_not_seen_by_compute() -> None:
    with EngramProcess(faults="eio:times=1") as engram:
        engram.ask(0, [5, 6])
        assert engram.answers(0) == [EngramReady(0, 0), EngramReady(0, 1)]
        engram.check_rows(0, [5, 6])


@pytest.mark.parametrize(
    ("fault", "said"), [("eio", "Input/output error"), ("short", "the file was cut short")]
)
def test_a_read_that_keeps_failing_fails_its_request_and_nothing_else(
    fault: str, said: str
) -> None:
    # The mini tables are so small that a layer is two reads, its rows and their scales; both layers
    # of a few tokens are read at once.
    with EngramProcess(faults=f"{fault}:times={4 * ATTEMPTS}") as engram:
        engram.ask(0, [5, 6])
        (answer,) = engram.answers(0)
        assert isinstance(answer, EngramFailed)
        for part in (said, ".safetensors", "layers.1.engram.embed.weight", "offset", "bytes"):
            assert part in answer.reason
        assert "\n" not in answer.reason
        engram.ask(1, [5, 6])
        assert engram.answers(1) == [EngramReady(1, 0), EngramReady(1, 1)]
        engram.check_rows(1, [5, 6])


def test_a_disk_that_hangs_fails_the_request_within_its_bound() -> None:
    with EngramProcess(faults="hang:seconds=0.2:times=1") as engram:
        engram.ask(0, [5])
        (answer,) = engram.answers(0)
        assert isinstance(answer, EngramFailed) and "without an answer" in answer.reason
        engram.ask(1, [5])
        engram.answers(1)
        engram.check_rows(1, [5])


def test_a_shard_cut_while_serving_fails_with_its_name_and_serving_goes_on(
    checkpoint: Path,
) -> None:
    tensor = "layers.3.engram.embed.weight"
    shard = shard_of(checkpoint, tensor)
    whole = shard.read_bytes()
    with EngramProcess(checkpoint=checkpoint, cache_bytes=0) as engram:
        os.truncate(shard, 4096)
        engram.ask(0, list(range(3, 60)))
        first, failed = engram.answers(0)
        assert first == EngramReady(0, 0)  # layer 1's table is in another shard and still whole
        assert isinstance(failed, EngramFailed)
        for part in (str(shard), tensor, "cut short"):
            assert part in failed.reason
        shard.write_bytes(whole)
        engram.ask(1, list(range(3, 60)))
        engram.answers(1)
        engram.check_rows(1, list(range(3, 60)))


def edit_config(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        path = checkpoint / "config.json"
        config = json.loads(path.read_text())
        change(config["text_config"])
        path.write_text(json.dumps(config))

    return edit


def other_tokenizer(checkpoint: Path) -> None:
    """A revision in which one token is spelled like another but for its case."""
    path = checkpoint / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    added = tokenizer["added_tokens"]
    added[-1]["content"] = added[-2]["content"].upper()
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (other_tokenizer, ("tokenizer.json", "classes", "415")),
        (lambda c: (c / "tokenizer.json").unlink(), ("tokenizer.json", "missing")),
        (
            edit_config(lambda text: text.pop("engram_vocab_size")),
            ("config.json", "engram_vocab_size is missing"),
        ),
        (
            edit_config(lambda text: text.update(engram_vocab_size=4000)),
            ("config.json", "engram_num_embeddings states", "engram_vocab_size 4000"),
        ),
        (
            edit_config(lambda text: text.update(engram_compressed_vocab_size=416)),
            ("tokenizer.json", "415 classes", "416"),
        ),
        (
            edit_config(lambda text: text.update(engram_num_embeddings=[100, 100])),
            (".safetensors", "layers.1.engram.embed.weight", "[100, 32]"),
        ),
        (
            lambda c: os.truncate(shard_of(c, "layers.3.engram.embed.weight"), 5000),
            (".safetensors", "5000 bytes"),
        ),
    ],
    ids=["another revision's tokenizer", "no tokenizer", "a constant missing", "other primes",
         "other class count", "more rows than the table has", "a table cut short"],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_ends_the_start_with_one_line(
    checkpoint: Path, damage: Callable[[Path], None], said: tuple[str, ...]
) -> None:
    damage(checkpoint)
    with EngramProcess(checkpoint=checkpoint, wait_ready=False) as engram:
        _, error = engram.process.communicate(timeout=TIMEOUT_S)
        assert engram.process.returncode == 3
        assert error.count("\n") == 1
        for part in said:
            assert part in error


def gone_within(pid_descriptor: int, seconds: float) -> bool:
    return bool(select.select([pid_descriptor], [], [], seconds)[0])


def test_it_ends_when_its_parents_pipe_closes() -> None:
    with EngramProcess() as engram:
        os.close(engram.pipe)
        engram.pipe = -1
        engram.process.wait(5)


def test_it_ends_when_its_parent_is_killed() -> None:
    script = (
        "import signal\n"
        "from tests.ipc.engram_process import EngramProcess\n"
        "with EngramProcess(latency=0.5) as engram:\n"
        "    engram.ask(0, [5, 6, 7])\n"
        "    print(engram.process.pid, engram.directory, flush=True)\n"
        "    signal.pause()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert parent.stdout is not None
    with parent.stdout:
        child, directory = parent.stdout.readline().split()
    descriptor = os.pidfd_open(int(child))
    try:
        assert not gone_within(descriptor, 0)
        parent.kill()
        assert gone_within(descriptor, 5)
    finally:
        parent.wait(TIMEOUT_S)
        os.close(descriptor)
        shutil.rmtree(directory)


def test_ctrl_c_in_the_terminal_leaves_it_to_its_parent() -> None:
    with EngramProcess() as engram:
        engram.process.send_signal(signal.SIGINT)
        engram.ask(0, [5])
        engram.answers(0)
        assert engram.stop() == 0


def test_it_stops_within_a_second_in_the_middle_of_a_slow_read() -> None:
    with EngramProcess(faults="delay:seconds=30") as engram:
        engram.ask(0, [5])
        begin = time.monotonic()
        assert engram.stop() == 0
        assert time.monotonic() - begin < 1


def test_a_process_that_dies_takes_nothing_of_the_ring_with_it() -> None:
    with EngramProcess(faults="die:after=4") as engram:
        engram.ask(0, [5, 6])
        engram.answers(0)
        engram.ask(1, [300, 301])
        engram.process.wait(TIMEOUT_S)
        assert engram.process.returncode == -signal.SIGKILL
        engram.check_rows(0, [5, 6])
        assert engram.ring is not None
        assert (engram.ring.ready[1] != 2).all()


def test_no_shard_is_mapped_and_memory_stays_small() -> None:
    with EngramProcess() as engram:
        engram.ask(0, list(range(3, 60)))
        engram.answers(0)
        maps = Path(f"/proc/{engram.process.pid}/maps").read_text()
        status = Path(f"/proc/{engram.process.pid}/status").read_text()
    assert ".safetensors" not in maps
    assert "torch" not in maps
    resident = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    assert int(resident.split()[1]) < 200 << 10  # KiB
