"""`headrace top` against a real server, in a pipe and on a terminal."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from rich.console import Console

from launch.terminal.figures_view import figures_view, sparkline
from launch.top import NoAnswer, top_command
from tests.server.fake_engine import FakeEngine
from tests.server.serving import Served, in_loop, serving
from tests.terminal.on_a_terminal import ROOT, on_a_terminal, private

__all__ = ["private"]


async def _top(served: Served, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, str(ROOT / "launch.py"), "top", "--url", served.url, *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@in_loop
async def test_figures_come_as_json_and_as_a_screen() -> None:
    async with serving(FakeEngine(), api_key="k") as served:
        await served.chat()
        code, out, _ = await _top(served, "--json", "--api-key", "k")
        assert code == 0 and json.loads(out)["totals"]["tokens"] == 7
        code, out, _ = await _top(served, "--api-key", "k")
        assert code == 0 and "where a token's time goes" in out and "mini" in out
        code, _, err = await _top(served)
        assert code == 2 and "API key is needed" in err and "Traceback" not in err


@in_loop
async def test_a_terminal_shows_it_live_until_ctrl_c(private: dict[str, str]) -> None:
    async with serving(FakeEngine()) as served:

        def watch() -> int:
            with on_a_terminal("top", "--url", served.url, environment=private) as terminal:
                terminal.wait_for("experts in memory")
                terminal.wait_for("experts in memory")
                terminal.type("\x03")
                return terminal.exit_code()

        assert await asyncio.to_thread(watch) == 130


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:9/x"])
def test_no_server_is_one_clear_line(url: str) -> None:
    with pytest.raises(NoAnswer, match="headrace serve") as raised:
        top_command.main(["--url", url, "--json"], standalone_mode=False)
    assert raised.value.exit_code == 2


def test_a_large_model_fits_a_small_window() -> None:
    stats = {
        "model": "m",
        "uptime_s": 5000.0,
        "queue": {"running": 0, "waiting": 0, "capacity": 8},
        "request": None,
        "totals": {"tokens": 0},
        "now": None,
        "history": [],
        "memory": {"arena_bytes": 1, "slots": 9, "all_experts": 15360, "resident_bytes": {}},
    }
    residency = {"layers": 40, "experts": 384, "cells": "AAAA" * (40 * 384 // 3)}
    console = Console(width=80, height=24, file=open("/dev/null", "w"))  # noqa: SIM115
    lines = console.render_lines(figures_view(stats, residency, 80, 24))
    assert all(sum(segment.cell_length for segment in line) <= 80 for line in lines)


def test_a_sparkline_shows_gaps_and_scales_to_the_largest() -> None:
    assert sparkline([None, 1.0, 8.0, None], 10) == " ▁█ "
    assert sparkline([0.0, 0.0], 10) == "  "
