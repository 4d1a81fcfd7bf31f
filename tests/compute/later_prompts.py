"""Prints how many kernels `warm_up` compiles, and then each of a few prompts.

Run as `python -m tests.compute.later_prompts` on a GPU, by test_warm_up.py.
"""

from __future__ import annotations

import sys

from triton import knobs

from compute.warm_up import warm_up
from tests.golden import harness
from tests.golden.harness import Mini

CHUNK_TOKENS = 96
TOKENS = list(range(3, 3 + 2 * CHUNK_TOKENS))
# Tokens of the passes over a sequence, each from an empty one on.
PROMPTS = ((5,), (33, 7), (64, 16), (CHUNK_TOKENS, 30), (18, 2, 3))


def main() -> None:
    """Count while they run."""
    compiled: list[str] = []

    def note(*_: object, **said: object) -> None:
        compiled.append(str(said.get("repr")))

    knobs.runtime.jit_post_compile_hook = note
    warm_up(harness.config(), harness.weights(), CHUNK_TOKENS)
    print(len(compiled))
    mini = Mini()
    for lengths in PROMPTS:
        before = len(compiled)
        state = mini.model.new_state()
        for length in lengths:
            mini.run(TOKENS, state, state.length, state.length + length, every=False)
        print(len(compiled) - before)
        for name in compiled[before:]:
            print(name, file=sys.stderr)


if __name__ == "__main__":
    main()
