"""`headrace serve` itself, as a user starts it: real processes, one for a whole test module."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import DefaultHttpxClient, OpenAI

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / "tests" / "golden" / "data" / "mini"
START_S = 90.0
_LISTENING = re.compile(r"page: (http://\S+)")


@dataclass(slots=True)
class RealServer:
    """A running server process."""

    url: str
    process: subprocess.Popen[str]
    client: OpenAI
    http: httpx.Client

    def child(self, module: str) -> int:
        """The process id of the child that runs `module`."""
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                pid = int(line.parent.name)
                command = line.read_bytes().split(b"\0")
                status = (line.parent / "status").read_text()
            except OSError:
                continue
            if module.encode() in command and f"PPid:\t{self.process.pid}\n" in status:
                return pid
        raise AssertionError(f"no child runs {module}")


@contextmanager
def real_server(
    checkpoint: Path = MINI, *arguments: str, most_files: int | None = None
) -> Iterator[RealServer]:
    """`most_files` is how many it may have open."""
    # What a test says does not stay on this machine, unless the test is about that.
    private = (
        {}
        if "--snapshot-dir" in arguments
        else {"HEADRACE_SNAPSHOT_BYTES": "0", "HEADRACE_WARM_DIR": "off"}
    )
    command = [sys.executable, str(ROOT / "launch.py"), "serve", str(checkpoint), "--port", "0"]
    if most_files is not None:
        command = ["sh", "-c", f'ulimit -S -n {most_files} && exec "$@"', "sh", *command]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--threads", "1", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **private},
    )
    try:
        url = _wait_for_address(process)
        with (
            httpx.Client(base_url=url, timeout=120, verify=False) as http,
            DefaultHttpxClient(verify=False, timeout=120) as inner,
        ):
            client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=inner)
            yield RealServer(url, process, client, http)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def _wait_for_address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    deadline = time.monotonic() + START_S
    heard = []
    for line in process.stderr:
        heard.append(line)
        found = _LISTENING.search(line)
        if found is not None:
            return found[1]
        if time.monotonic() > deadline:
            break
    raise AssertionError("the server did not start:\n" + "".join(heard))
