"""Whether the request at hand has been given up, asked wherever a pass can take long.

Owns nothing but the question. A prefill pass over a large checkpoint reads for minutes, and a disk
may stop answering: who has gone away is not to be waited for until the pass ends.
"""

from __future__ import annotations

from collections.abc import Callable


class Cancelled(Exception):
    """The request's sender no longer wants it."""


class Interruption:
    """Ends a pass midway; the sequence state is then unusable until it is restored."""

    def __init__(self) -> None:
        self._cancelled: Callable[[], bool] = lambda: False

    def watch(self, cancelled: Callable[[], bool]) -> None:
        """Ask `cancelled` from now on."""
        self._cancelled = cancelled

    def check(self) -> None:
        """Raise Cancelled where the request has been given up."""
        if self._cancelled():
            raise Cancelled
