"""What the server itself has counted: requests, tokens, and the one being answered now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Histogram


class WatchedRequest:
    """The request at hand. Times are CLOCK_MONOTONIC seconds."""

    def __init__(self, activity: Activity, prompt_tokens: int) -> None:
        self._activity = activity
        self.prompt_tokens = prompt_tokens
        self.prefilled = self.reused = self.tokens = 0
        self.began = self.last = time.monotonic()

    def prefill(self, done: int, total: int, reused: int) -> None:
        """`done` of the prompt's `total` tokens are computed, `reused` of them before."""
        self.prefilled, self.reused = done, reused

    def token(self) -> None:
        """One more token has come."""
        now = time.monotonic()
        if self.tokens == 0:
            self._activity.first_token.observe(now - self.began)
            self._activity.prefill_seconds += now - self.began
        else:
            self._activity.decode_seconds += now - self.last
            self._activity.decode_tokens += 1
        self.last = now
        self.tokens += 1
        self._activity.tokens += 1


class Activity:
    """Totals since the start; written by answers, read by whoever shows figures."""

    def __init__(self) -> None:
        self.started = time.time()
        self.current: WatchedRequest | None = None
        self.prompt_tokens = self.reused_tokens = 0
        self.tokens = 0
        self.decode_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self.outcomes: Counter[str] = Counter()
        self.registry = CollectorRegistry()
        self.first_token = Histogram(
            "headrace_first_token_seconds",
            "Seconds from the turn to the first token",
            registry=self.registry,
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
        )

    @contextmanager
    def request(self, prompt_tokens: int) -> Iterator[WatchedRequest]:
        """The request that computes from now on."""
        watched = self.current = WatchedRequest(self, prompt_tokens)
        try:
            yield watched
        finally:
            self.current = None
            self.prompt_tokens += watched.prompt_tokens
            self.reused_tokens += watched.reused

    def count(self, outcome: str) -> None:
        """One more request ended: `stop`, `length`, `tool_calls`, `left`, `refused`, `error`."""
        self.outcomes[outcome] += 1
