"""Does a long conversation answer as fast as a fresh prompt? First tokens, side by side.

    python tools/turns.py tests/golden/data/mini --rounds 7

Each round grows a conversation to its tenth turn, takes the seconds to that turn's first token, and
right after it those of a fresh prompt with as many tokens as the turn added. Prints both medians
and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.server.real_server import real_server  # noqa: E402

TURNS = 10
WORDS = ("river", "wheel", "stone", "water", "mill", "gate", "grain", "flour", "sluice", "weir")


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to the first token, of the tenth turn and of a fresh prompt. The turn's prompt had
    `prompt` tokens, of which `new` were computed; the fresh one's had `fresh`."""

    prompt: int
    new: int
    fresh: int
    turn_s: float
    fresh_s: float

    @property
    def ratio(self) -> float:
        """Below 1.2 is the goal."""
        return self.turn_s / self.fresh_s


def measure(http: httpx.Client, seed: int, words: int) -> Round:
    """One conversation and one fresh prompt."""
    draw = random.Random(seed)
    model = http.get("/v1/models").json()["data"][0]["id"]
    messages: list[dict[str, str]] = []
    used: dict[str, Any] = {}
    for _ in range(TURNS):
        text = f"{seed} " + " ".join(draw.choices(WORDS, k=words))
        messages.append({"role": "user", "content": text})
        body = {"model": model, "messages": messages, "max_tokens": 2}
        answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        content = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
        used = answer
    new = used["usage"]["prompt_tokens"] - used["usage"]["prompt_tokens_details"]["cached_tokens"]
    # A question of its own, of as many words, which no other prompt here begins like.
    text = f"fresh {seed} " + " ".join(draw.choices(WORDS, k=words))
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    fresh = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    fresh_new = (
        fresh["usage"]["prompt_tokens"] - fresh["usage"]["prompt_tokens_details"]["cached_tokens"]
    )
    seconds = [found["headrace"]["ttft_s"] for found in (used, fresh)]
    return Round(used["usage"]["prompt_tokens"], new, fresh_new, *seconds)


def run(checkpoint: Path, rounds: int, words: int) -> list[Round]:
    """All rounds against one server."""
    with real_server(checkpoint, "--max-context", "8192", "--quiet") as server:
        return [measure(server.http, seed, words) for seed in range(rounds)]


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--words", type=int, default=40, help="words a turn adds")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = run(given.checkpoint, given.rounds, given.words)
    ratio = statistics.median(one.ratio for one in found)
    if given.json:
        print(json.dumps({"ratio": ratio, "rounds": [asdict(one) for one in found]}, indent=2))
        return
    turn = statistics.median(one.turn_s for one in found)
    fresh = statistics.median(one.fresh_s for one in found)
    print(
        f"tenth turn of {found[0].prompt} tokens, {found[0].new} of them new: first token after "
        f"{turn:.3f} s; a fresh prompt of {found[0].fresh}: {fresh:.3f} s; ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
