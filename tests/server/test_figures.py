"""What dashboards and monitoring are told."""

from __future__ import annotations

import asyncio
import base64

from launch.server.rates import Sample, rates
from protocol import counters
from tests.server.fake_engine import FakeEngine
from tests.server.serving import in_loop, serving


@in_loop
async def test_metrics_are_prometheus_text_with_both_kinds_of_figures() -> None:
    async with serving(FakeEngine()) as served:
        await served.chat()
        answer = await served.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        lines = answer.text.splitlines()
        assert 'headrace_demand_hits_total{process="compute"} 10.0' in lines
        assert 'headrace_requests_total{outcome="stop"} 1.0' in lines
        assert "headrace_server_tokens_total 7.0" in lines
        assert "headrace_first_token_seconds_count 1.0" in lines
        assert 'headrace_queue_depth{process="experts"} 0.0' in lines


@in_loop
async def test_health_says_degraded_once_a_read_failed() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        assert (await served.http.get("/health")).json()["status"] == "ok"
        engine.counters["read_failures"] = 2
        answer = await served.http.get("/health")
        assert answer.status_code == 200
        assert answer.json() == {"status": "degraded", "troubles": {"compute.read_failures": 2}}


@in_loop
async def test_stats_show_the_request_at_hand_and_the_rates() -> None:
    engine = FakeEngine("x" * 50)
    engine.hold_from = 20
    async with serving(engine) as served:
        await served.http.get("/stats")
        call = asyncio.create_task(served.chat())
        await engine.reached.wait()
        engine.counters |= {"demand_hits": 110, "demand_misses": 25, "steps": 25}
        while not (stats := (await served.http.get("/stats?history=5")).json())["history"]:
            await asyncio.sleep(0.05)
        assert stats["request"]["tokens"] == 20
        assert stats["request"]["prefilled"] == stats["request"]["prompt_tokens"]
        assert stats["queue"]["running"] == 1
        assert stats["now"]["hit_rate"] == 0.8
        engine.hold_from = None
        engine.gate.release()
        await call
        stats = (await served.http.get("/stats")).json()
        assert stats["request"] is None and stats["totals"]["tokens"] == 51
        assert stats["memory"]["resident_bytes"]["compute"] > 0


@in_loop
async def test_residency_shows_every_expert_and_how_lately_it_was_read() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        found = (await served.http.get("/residency")).json()
        cells = base64.b64decode(found["cells"])
        assert (found["layers"], found["experts"], len(cells)) == (8, 8, 64)
        assert [cell > 0 for cell in cells] == [True] * 3 + [False] * 61
        engine.directory.entry[0, 0] = -1
        engine.directory.entry[7, 7] = 3
        cells = base64.b64decode((await served.http.get("/residency")).json()["cells"])
        assert cells[0] == 0 and cells[63] >= 254


@in_loop
async def test_a_trace_of_the_next_tokens_is_a_file_to_download() -> None:
    engine = FakeEngine("x" * 30)
    engine.hold_from = 10
    async with serving(engine) as served:
        recording = asyncio.create_task(served.http.post("/trace?tokens=5"))
        while not engine.tracing:
            await asyncio.sleep(0.01)
        assert (await served.http.post("/trace?tokens=5")).status_code == 409
        call = asyncio.create_task(served.chat())
        answer = await recording
        assert answer.json() == {"traceEvents": []}
        assert "attachment" in answer.headers["content-disposition"]
        assert not engine.tracing
        engine.hold_from = None
        engine.gate.release()
        await call
        for tokens in ("0", "x", "99999"):
            assert (await served.http.post(f"/trace?tokens={tokens}")).status_code == 400


@in_loop
async def test_a_client_that_leaves_ends_its_trace() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        recording = asyncio.create_task(served.http.post("/trace?tokens=5"))
        while not engine.tracing:
            await asyncio.sleep(0.01)
        recording.cancel()
        while engine.tracing:
            await asyncio.sleep(0.01)


def _sample(time: float, tokens: int, seconds: float, **counted: dict[str, float]) -> Sample:
    return Sample(time, counted, tokens, tokens, seconds, 0.0)


def test_rates_are_differences_over_time() -> None:
    before = _sample(10.0, 0, 0.0, compute={"steps": 3}, experts={"read_bytes": 100})
    after = _sample(
        12.0,
        8,
        2.0,
        compute={
            counters.STEPS: 11,
            counters.STALL_EXPERT_S: 0.8,
            counters.STALL_ENGRAM_S: 0.2,
            counters.DEMAND_MISSES: 2,
            counters.DEMAND_HITS: 6,
            counters.ENGRAM_ROWS: 100,
        },
        experts={
            counters.READ_BYTES: 2100,
            counters.PREDICTED_ISSUED: 10,
            counters.PREDICTED_USED: 6,
        },
        engram={
            counters.ENGRAM_ROWS: 100,
            counters.ENGRAM_ROWS_READ: 50,
            counters.ENGRAM_READ_SECONDS: 0.005,
            counters.ENGRAM_CACHE_HITS: 25,
        },
        **{"reader-0": {counters.READ_BYTES: 2100}},
    )
    found = rates(before, after)
    assert found["tokens_per_s"] == 4.0
    assert found["pass_ms"] == {"compute": 125.0, "expert": 100.0, "engram": 25.0}
    assert (found["hit_rate"], found["precision"], found["recall"]) == (0.75, 0.6, 0.75)
    assert found["read_bytes_per_s"] == 1000.0
    assert (found["engram_hit_rate"], found["engram_row_us"]) == (0.25, 100.0)


def test_rates_of_nothing_are_none_and_a_restarted_process_is_no_negative_rate() -> None:
    before = _sample(1.0, 5, 1.0, experts={"read_bytes": 500})
    found = rates(before, _sample(2.0, 5, 1.0, experts={"read_bytes": 20}))
    assert found["tokens_per_s"] is None and found["pass_ms"] is None
    assert found["hit_rate"] is None and found["read_bytes_per_s"] == 0.0
