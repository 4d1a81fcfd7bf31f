"""Symptoms: a process that hangs is never noticed; Ctrl-Z and `fg` end a group that was well."""

from __future__ import annotations

from launch.silence import LOOKS, Silence

PIDS = {"compute": 10, "experts": 11}


def looks(silence: Silence, begin: float, count: int) -> list[list[str]]:
    """What `count` looks at the usual pace find."""
    return [silence.look(PIDS, begin + (n + 1) * silence.pause) for n in range(count)]


def test_a_silent_process_is_found_early_or_never() -> None:
    silence = Silence(bound=5.0)
    silence.begin(100.0)
    for n in range(LOOKS - 1):
        silence.heard("experts")
        assert silence.look(PIDS, 100.0 + (n + 1) * silence.pause) == []
    silence.heard("experts")
    assert silence.look(PIDS, 105.0) == ["compute"]


def test_time_in_which_nobody_looked_counts() -> None:
    silence = Silence(bound=5.0)
    silence.begin(100.0)
    assert looks(silence, 100.0, 3) == [[]] * 3
    # An hour in which all were stopped; they have had no chance to answer yet.
    assert silence.look(PIDS, 3700.0) == []
    silence.heard("experts")
    found = looks(silence, 3700.0, LOOKS - 5)
    assert found[-1] == ["compute"] and not any(found[:-1])


def test_a_replacement_inherits_the_silence_of_what_it_replaces() -> None:
    silence = Silence(bound=5.0)
    silence.begin(100.0)
    assert looks(silence, 100.0, LOOKS)[-1] == ["compute", "experts"]
    assert silence.look({**PIDS, "compute": 12}, 105.1) == ["experts"]
