"""Many short requests against a real server: does it stay up, and does its memory stay flat?

    python tools/soak.py tests/golden/data/mini --requests 10000

Starts `headrace serve`, asks short questions of every kind one after another (chats, completions,
streams that are left midway, bad requests), kills a reader halfway, and watches the private memory
of every process. Exit code 0 only if every answer was right, the server is up, and no process grew
by more than `ALLOWED_BYTES` after the first quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launch.server.monitor import private_bytes  # noqa: E402
from tests.server.real_server import RealServer, real_server  # noqa: E402

# An allocator's own noise: arenas of threads, a few dozen mebibytes of which come and go.
ALLOWED_BYTES = 24 << 20
SAMPLES = 40
# Small budgets, so that both are full long before the end and what grows is a leak.
BUDGETS = ("--keep", "8MiB", "--snapshot-bytes", "16MiB")


@dataclass(slots=True)
class Account:
    """What happened. `memory` has a row a sample: requests done, and private bytes by process."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    seconds: float = 0.0

    def growth(self) -> dict[str, int]:
        """Bytes each process grew from the end of the first quarter to the last sample."""
        early = self.memory[len(self.memory) // 4][1]
        last = self.memory[-1][1]
        return {name: last[name] - early[name] for name in last if name in early}


def run(checkpoint: Path, requests: int) -> Account:
    """The whole soak."""
    account = Account()
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as states:
        arguments = (*BUDGETS, "--snapshot-dir", states, "--max-context", "512", "--quiet")
        with real_server(checkpoint, *arguments) as server:
            model = server.http.get("/v1/models").json()["data"][0]["id"]
            begin = time.monotonic()
            for number in range(requests):
                if number % max(1, requests // SAMPLES) == 0:
                    account.memory.append((number, _memory(server)))
                    print(f"{number} of {requests}", file=sys.stderr, flush=True)
                if number == requests // 2:
                    os.kill(server.child("expert_io.reader"), signal.SIGKILL)
                outcome = _ask(server.http, model, number)
                account.outcomes[outcome] += 1
                if outcome.startswith("wrong"):
                    account.wrong.append(f"request {number}: {outcome}")
            account.seconds = time.monotonic() - begin
            account.memory.append((requests, _memory(server)))
            if server.http.get("/health").json()["status"] != "degraded":
                account.wrong.append("the killed reader is not in /health")
    return account


def _ask(http: httpx.Client, model: str, number: int) -> str:
    """One request of the kind that `number` has; what came of it."""
    chat = {"model": model, "messages": [{"role": "user", "content": f"Number {number}."}]}
    kind = number % 10
    if kind == 7:
        bad = {**chat, "temperature": "hot"}
        return _expect("refused", http.post("/v1/chat/completions", json=bad).status_code, 400)
    if kind == 8:
        body = {"model": model, "prompt": f"Once {number}", "max_tokens": 2, "logprobs": 1}
        return _expect("completion", http.post("/v1/completions", json=body).status_code, 200)
    if kind == 9:
        body = {**chat, "max_tokens": 50, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
        return "left"
    limits: dict[str, Any] = {"max_tokens": 1 + kind % 2}
    answer = http.post("/v1/chat/completions", json={**chat, **limits})
    if answer.status_code != 200:
        return f"wrong: status {answer.status_code}: {answer.text[:200]}"
    used = answer.json()["usage"]["completion_tokens"]
    return "chat" if used == limits["max_tokens"] else f"wrong: {used} tokens for {limits}"


def _expect(name: str, status: int, wanted: int) -> str:
    return name if status == wanted else f"wrong: {name} had status {status}"


def _memory(server: RealServer) -> dict[str, int]:
    found = {"server": private_bytes(server.process.pid)}
    for module in ("compute.process", "expert_io.service", "engram_io.service"):
        found[module] = private_bytes(server.child(module))
    return {name: size for name, size in found.items() if size is not None}


def main() -> None:
    """Parse, soak, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", type=Path, help="write the account here")
    given = parser.parse_args()
    account = run(given.checkpoint, given.requests)
    growth = account.growth()
    print(f"{given.requests} requests in {account.seconds:.0f} s: {dict(account.outcomes)}")
    for name, size in growth.items():
        last = account.memory[-1][1][name]
        print(f"{name:20} {last / 2**20:7.1f} MiB, grew {size / 2**20:+.1f} MiB")
    for line in account.wrong[:20]:
        print(line)
    if given.json is not None:
        report = {
            "requests": given.requests,
            "seconds": account.seconds,
            "outcomes": account.outcomes,
            "growth_bytes": growth,
            "memory": account.memory,
            "wrong": account.wrong,
        }
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    flat = all(size <= ALLOWED_BYTES for size in growth.values())
    sys.exit(0 if flat and not account.wrong else 1)


if __name__ == "__main__":
    main()
