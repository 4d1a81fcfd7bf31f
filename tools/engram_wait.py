"""How long compute waits for a token's engram rows: from asking until both layers' are there.

The engram service is a process of its own over the mini checkpoint that the tests carry; compute's
side is this process. Run as `python -m tools.engram_wait`, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from protocol.busy_poll import BUSY_POLL_S
from tests.ipc.engram_process import EngramProcess
from tests.ipc.test_compute_engram import ring_engram

WARM_TOKENS = 20
PAUSE_S = 0.005  # a token's time on a GPU


def main() -> None:
    """Print the median and the 90th percentile in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=300, help="tokens to time (default 300)")
    parser.add_argument("--busy-poll", action="store_true", help="whoever waits does not sleep")
    options = parser.parse_args()
    count, busy_poll = options.tokens, BUSY_POLL_S * options.busy_poll
    with (
        EngramProcess(busy_poll=busy_poll) as engram,
        ring_engram(engram, busy_poll=busy_poll) as source,
    ):
        draw = random.Random(1)
        reach, vocabulary = engram.config.engram_max_ngram_size - 1, engram.config.vocab_size
        tokens: list[int] = []
        waited = []
        for at in range(WARM_TOKENS + count):
            time.sleep(PAUSE_S)
            token = draw.randrange(3, vocabulary)
            begin = time.perf_counter()
            ticket = source.request(at, [token], tokens[max(0, at - reach) :])
            for index in range(len(engram.config.engram_layer_ids)):
                source.rows(ticket, index)
            waited.append((time.perf_counter() - begin) * 1e6)
            source.done(ticket)
            tokens.append(token)
    timed = sorted(waited[WARM_TOKENS:])
    slow = timed[int(0.9 * len(timed))]
    print(f"rows of a token: {statistics.median(timed):.0f} us (p90 {slow:.0f})")


if __name__ == "__main__":
    main()
