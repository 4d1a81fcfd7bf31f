"""The server over the real process group, with the official client. The fixture's weights are
random, so its text is noise; what is tested is that noise comes through whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, BadRequestError, NotFoundError, RateLimitError
from prometheus_client.parser import text_string_to_metric_families

from tests.server.real_server import MINI, ROOT, RealServer, real_server

CONTEXT = 512
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(MINI, "--max-context", str(CONTEXT)) as running:
        yield running


def ask(server: RealServer, text: str = "Tell me.", **more: Any) -> Any:
    more = {"max_tokens": 8, **more}
    messages: Any = [{"role": "user", "content": text}]
    return server.client.chat.completions.create(model="mini", messages=messages, **more)


def joined(stream: Any) -> tuple[str, str, str | None]:
    content = reasoning = ""
    finish = None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
    return content, reasoning, finish


def test_the_same_request_gives_the_same_text_whole_and_streamed(server: RealServer) -> None:
    for text in ("Tell me.", "🌍 emoji and 漢字かな"):
        whole = ask(server, text)
        assert whole.usage.completion_tokens == 8
        assert joined(ask(server, text, stream=True))[0] == whole.choices[0].message.content
        assert whole.model_extra["headrace"]["demand_hits"] > 0


def test_characters_over_several_tokens_are_never_half(server: RealServer) -> None:
    # A byte-level vocabulary: sampled freely, characters of several tokens are common.
    for seed in range(3):
        sampled: Any = {"temperature": 2.0, "seed": seed, "max_tokens": 12, "logprobs": True}
        stream = ask(server, stream=True, **sampled)
        pieces = [c.delta.content or "" for chunk in stream for c in chunk.choices]
        whole = ask(server, **sampled).choices[0]
        assert "".join(pieces) == whole.message.content
        spelled = b"".join(bytes(entry.bytes) for entry in whole.logprobs.content)
        shown = whole.message.content.encode()
        # Only what belongs to no character was replaced, and only the very end left out.
        assert spelled.decode("utf-8", "replace").startswith(shown.decode().rstrip("\ufffd"))


def test_reasoning_and_effort_go_through(server: RealServer) -> None:
    content, reasoning, finish = joined(ask(server, stream=True, reasoning_effort="low"))
    assert reasoning and not content and finish == "length"


def test_a_forced_tool_call_is_a_tool_call(server: RealServer) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = ask(server, tools=[WEATHER], tool_choice=choice).choices[0]
    assert answer.message.tool_calls[0].function.name == "weather"
    assert not answer.message.content and answer.finish_reason == "length"


def test_a_tool_result_in_the_history_is_read(server: RealServer) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: Any = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    answer = server.client.chat.completions.create(
        model="mini", messages=messages, tools=[WEATHER], max_tokens=4
    )
    assert answer.usage.completion_tokens == 4


def test_logprobs_are_sorted_and_belong_to_the_text(server: RealServer) -> None:
    entries = ask(server, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(entries) == 8
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        # Greedy: what was taken is the best alternative.
        assert tops == sorted(tops, reverse=True) and tops[0] == entry.logprob <= 0


def test_plain_completions_continue_text(server: RealServer) -> None:
    answer = server.client.completions.create(
        model="mini", prompt="Once upon", max_tokens=6, logprobs=2
    )
    found = answer.choices[0].logprobs
    assert len(found.tokens) == 6 and found.text_offset[0] == 0
    stream = server.client.completions.create(
        model="mini", prompt="Once upon", max_tokens=6, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_a_stop_string_over_three_tokens_ends_the_text_before_it(server: RealServer) -> None:
    answer = ask(server, max_tokens=12, logprobs=True).choices[0]
    text = answer.message.content
    tokens = [bytes(entry.bytes).decode("utf-8", "replace") for entry in answer.logprobs.content]
    start = next(
        i
        for i in range(2, len(tokens) - 2)
        if all(len(t) > 0 and "\ufffd" not in t for t in tokens[i : i + 3])
        and len(tokens[i]) * len(tokens[i + 2]) > 0
    )
    stop = tokens[start][-1] + tokens[start + 1] + tokens[start + 2][0]
    before = text[: text.index(stop)]
    for stream in (False, True):
        found = ask(server, max_tokens=12, stop=stop, stream=stream)
        content = joined(found)[0] if stream else found.choices[0].message.content
        assert content == before


def test_50_clients_at_once_against_a_queue_of_8(server: RealServer) -> None:
    start = threading.Barrier(50)

    def one(number: int) -> str | int:
        start.wait(60)
        try:
            return str(ask(server, f"Number {number}", max_tokens=3).choices[0].message.content)
        except RateLimitError as error:
            return int(error.response.headers["retry-after"])

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(one, range(50)))
    served = [answer for answer in answers if isinstance(answer, str)]
    # Some may finish while others still arrive, but no more than the line holds are kept waiting.
    assert len(served) >= 9
    assert all(answer >= 1 for answer in answers if isinstance(answer, int))
    assert len(served) < 50
    assert ask(server, max_tokens=1).usage.completion_tokens == 1


def test_a_client_that_leaves_stops_the_engine_within_a_token(server: RealServer) -> None:
    before = _steps(server)
    stream = ask(server, "Go on.", max_tokens=200, stream=True)
    for _ in range(3):
        next(iter(stream))
    stream.close()
    # The next request is answered at once instead of after 200 tokens, and steps say why.
    ask(server, max_tokens=1)
    assert _steps(server) - before < 20


def _steps(server: RealServer) -> float:
    return float(_metric(server, 'headrace_steps_total{process="compute"}'))


def _metric(server: RealServer, name: str) -> str:
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith(name):
            return line.split()[-1]
    raise AssertionError(f"no metric {name}")


def test_every_metric_says_what_it_counts(server: RealServer) -> None:
    ask(server)
    families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    assert len(families) > 30
    assert [family.name for family in families if not family.documentation] == []


def test_a_slow_reader_holds_nobody_up(server: RealServer) -> None:
    body = {"model": "mini", "messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
    data = json.dumps({**body, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        slow.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        assert ask(server, max_tokens=2).usage.completion_tokens == 2
        received = b""
        while b"[DONE]" not in received:
            received += slow.recv(1 << 16)
        assert received.count(b'"logprob"') >= 20


def test_a_body_of_100_mb_malformed_json_and_an_unknown_model(server: RealServer) -> None:
    large = server.http.post("/v1/chat/completions", content=b" " * 100_000_000)
    assert large.status_code == 413
    broken = server.http.post("/v1/chat/completions", content=b'{"model": "mini", ')
    assert broken.status_code == 400 and "not JSON" in broken.json()["error"]["message"]
    with pytest.raises(NotFoundError, match="'mini'"):
        server.client.completions.create(model="gpt-4", prompt="x")


def test_a_context_that_overflows_says_the_numbers(server: RealServer) -> None:
    with pytest.raises(BadRequestError) as raised:
        ask(server, "word " * 700)
    assert f"context is {CONTEXT} tokens" in str(raised.value)
    answer = ask(server, max_tokens=CONTEXT - 100, stop=["e"])
    assert answer.usage.total_tokens <= CONTEXT


def test_a_reader_that_dies_in_the_middle_changes_nothing(server: RealServer) -> None:
    expected = ask(server, "Of readers.", max_tokens=10).choices[0].message.content
    stream = ask(server, "Of readers.", max_tokens=10, stream=True)
    content = ""
    for number, chunk in enumerate(stream):
        if number == 3:
            os.kill(server.child("expert_io.reader"), signal.SIGKILL)
        content += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert content == expected
    health = server.http.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "degraded"


def test_a_trace_of_the_next_tokens_names_every_process(server: RealServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(server.http.post, "/trace?tokens=4")
        ask(server, max_tokens=10)
        trace = recording.result().json()
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert {"compute", "experts", "engram"} <= names


def test_a_second_turn_prefills_only_what_is_new(server: RealServer) -> None:
    messages: Any = [{"role": "user", "content": "A first question, of some length."}]
    first = server.client.chat.completions.create(model="mini", messages=messages, max_tokens=4)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And more?"},
    ]
    second = server.client.chat.completions.create(model="mini", messages=messages, max_tokens=4)
    reused = second.usage.prompt_tokens_details.cached_tokens
    assert reused >= first.usage.prompt_tokens - 1


def test_a_conversation_goes_on_after_a_restart_and_without_its_damaged_state(
    tmp_path: Path,
) -> None:
    states = ("--snapshot-dir", str(tmp_path))

    def turn(server: RealServer) -> tuple[str, int]:
        answer = ask(server, "A first question, of some length.", max_tokens=4)
        reused = answer.usage.prompt_tokens_details.cached_tokens
        return answer.choices[0].message.content, reused

    with real_server(MINI, *states) as server:
        fresh, reused = turn(server)
        assert reused == 0
    files = list(tmp_path.glob("*.state"))
    assert len(files) == 2
    with real_server(MINI, *states) as server:
        again, reused = turn(server)
        assert again == fresh and reused > 0
    for path in files:
        path.write_bytes(path.read_bytes()[:-50])
    with real_server(MINI, *states) as server:
        assert turn(server) == (fresh, 0)


def test_compute_killed_ends_the_server_with_one_line() -> None:
    with real_server() as server:
        stream = ask(server, max_tokens=200, stream=True)
        next(iter(stream))
        os.kill(server.child("compute.process"), signal.SIGKILL)
        with pytest.raises(APIError, match="compute ended: killed by SIGKILL"):
            for _ in stream:
                pass
        assert server.process.wait(5) == 5
        assert server.process.stderr is not None
        assert "compute ended: killed by SIGKILL" in server.process.stderr.read()


def test_a_taken_port_is_found_once_the_weights_are_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, str(ROOT / "launch.py"), "serve", str(MINI), "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 4
    assert ended.stderr == (
        f"headrace: cannot listen on 127.0.0.1 port {port} (Address already in use); choose "
        "another with --host and --port\n"
    )


def test_idle_connections_leave_no_file_to_replace_a_reader_with() -> None:
    with real_server(most_files=100) as server, contextlib.ExitStack() as idle:
        for _ in range(100):
            address = ("127.0.0.1", server.http.base_url.port)
            idle.enter_context(socket.create_connection(address))
        os.kill(server.child("expert_io.reader"), signal.SIGKILL)
        assert server.process.stderr is not None
        said = next(line for line in server.process.stderr if "SIGKILL" in line)
        assert said.endswith(": killed by SIGKILL; replaced\n")
        idle.close()
        assert ask(server).usage.completion_tokens == 8
