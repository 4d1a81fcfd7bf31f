"""Conversations continue: what `tools/turns.py` measures, once."""

from __future__ import annotations

from tests.server.real_server import MINI
from tools import turns


def test_the_tenth_turn_computes_only_what_it_adds() -> None:
    (found,) = turns.run(MINI, rounds=1, words=15)
    assert found.prompt > 8 * found.new
    # The rest of the last answer comes on top of the question.
    assert found.new <= found.fresh + 8
    # The goal is 1.2; one round on a busy machine only shows that it is not ten times that.
    assert found.ratio < 3
