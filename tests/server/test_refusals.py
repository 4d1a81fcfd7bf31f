"""Bad requests: each names the field that is wrong and what would be right, and costs nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError

from launch.server.options import ServerOptions
from protocol.errors import CheckpointError, ResourceError, UsageError
from tests.server.fake_engine import FakeEngine
from tests.server.serving import chat_body, in_loop, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER: Any = {"role": "user", "content": "x"}
CALL: Any = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}

WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"min_p": -0.1}, "min_p", "greater than or equal to 0"),
    ({"frequency_penalty": 3}, "frequency_penalty", "less than or equal to 2"),
    ({"presence_penalty": -3}, "presence_penalty", "greater than or equal to -2"),
    ({"n": 2}, "n", "only 1"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "only {}"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"seed": 1 << 70}, "seed", "64 bits"),
    ({"stop": ""}, "stop", "1 to 1024"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": 5}, "stop", "a string or a list"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "expected none"),
    ({"thinking": {"type": "maybe"}}, "thinking.type", "'enabled' or 'disabled'"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": "maybe"}, "tool_choice", '"auto"'),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", ""),
    ({"tools": [{"type": "web"}]}, "tools[0].type", "'function'"),
    ({"functions": [{"name": "f"}]}, "functions", "only []"),
    ({"response_format": {"type": "xml"}}, "response_format", "expected type text"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'user'"),
    ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages", "assistant's"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {**CALL, "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
                    ],
                },
                {"role": "tool", "content": "x", "tool_call_id": "a"},
            ]
        },
        "messages",
        "not a JSON object",
    ),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "missing"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls", "assistant"),
    (
        {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "zz"}]},
        "messages",
        "'zz'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
        "image_url",
    ),
]


@pytest.mark.parametrize(("wrong", "param", "says"), WRONG_CHATS)
@in_loop
async def test_a_wrong_field_is_named(wrong: dict[str, Any], param: str, says: str) -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        answer = await served.post(CHAT, chat_body(**wrong))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert says in error["message"] and error["type"] == "invalid_request_error"
        assert not engine.requests


@in_loop
async def test_arguments_in_the_history_have_to_be_json() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": "{broken"}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    async with serving(FakeEngine()) as served:
        error = (await served.post(CHAT, chat_body(messages=messages))).json()["error"]
        assert "'f' are not a JSON object" in error["message"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 9999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [509]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ],
)
@in_loop
async def test_a_wrong_field_of_a_completion_is_named(wrong: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        answer = await served.post(COMPLETIONS, {"model": "mini", **wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert not engine.requests


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "mini", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"a":' * 100_000,
        b'{"model": "mini", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
    ],
)
@in_loop
async def test_malformed_json_is_a_400_and_nothing_else(raw: bytes) -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        answer = await served.http.post(CHAT, content=raw)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await served.chat()).choices[0].message.content == "Hello."


@in_loop
async def test_an_unknown_model_is_a_404_that_names_the_served_one() -> None:
    async with serving(FakeEngine()) as served:
        with pytest.raises(NotFoundError, match="this server has 'mini'"):
            await served.client.chat.completions.create(model="gpt-4", messages=[USER])
        with pytest.raises(NotFoundError):
            await served.client.models.retrieve("gpt-4")


@in_loop
async def test_a_context_that_overflows_is_a_400_with_the_numbers() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        with pytest.raises(BadRequestError) as raised:
            await served.chat("word " * 5000)
        assert raised.value.code == "context_length_exceeded"
        needed = len(engine.tokenizer.encode("word " * 5000).ids) + 4 + 1
        assert "context is 4096 tokens" in str(raised.value)
        assert f"needs {needed}" in str(raised.value)
        with pytest.raises(BadRequestError, match="5 in the messages and 4092 for the answer"):
            await served.chat("x", max_tokens=4092)
        assert not engine.requests


@pytest.mark.parametrize("stated", [True, False])
@in_loop
async def test_a_body_of_100_mb_is_a_413_and_takes_no_memory(stated: bool) -> None:
    async def parts() -> Any:
        for _ in range(100):
            yield b" " * 1_000_000

    before = _peak_bytes()
    async with serving(FakeEngine()) as served:
        if stated:
            answer = await served.http.post(
                CHAT, content=parts(), headers={"Content-Length": "100000000"}
            )
        else:
            answer = await served.http.post(CHAT, content=parts())
        assert answer.status_code == 413
        assert "this server takes 16777216" in answer.json()["error"]["message"]
        assert (await served.chat()).choices[0].message.content == "Hello."
    assert _peak_bytes() - before < 60 << 20


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@in_loop
async def test_without_the_key_nothing_but_health_and_the_page_answers() -> None:
    async with serving(FakeEngine(), api_key="secret") as served:
        for path in ("/v1/models", "/stats", "/metrics", "/residency"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                answer = await served.http.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await served.http.get("/health")).status_code == 200
        assert (await served.http.get("/")).status_code == 200
        assert (await served.chat()).choices[0].message.content == "Hello."
        with pytest.raises(AuthenticationError):
            await served.client.with_options(api_key="other").models.list()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "[bad"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ],
)
@in_loop
async def test_a_web_page_of_somebody_else_cannot_use_the_server(headers: dict[str, str]) -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        answer = await served.post(CHAT, chat_body(), headers=headers)
        assert answer.status_code == 403
        assert not engine.requests
        own = {"Origin": served.url}
        assert (await served.post(CHAT, chat_body(), headers=own)).status_code == 200


def test_another_address_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "myhost"):
        with pytest.raises(UsageError, match="HEADRACE_API_KEY"):
            ServerOptions(host=host)
        ServerOptions(host=host, api_key="x")
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.2"):
        ServerOptions(host=host)


@in_loop
async def test_a_taken_port_is_one_clear_line() -> None:
    async with serving(FakeEngine()) as served:
        from launch.server.http import running_server

        _, port = served.host_port
        with pytest.raises(ResourceError, match=f"port {port} .*in use"):
            async with running_server(FakeEngine(), ServerOptions(port=port)):
                pass


@in_loop
async def test_unknown_paths_and_methods_have_the_error_shape() -> None:
    async with serving(FakeEngine()) as served:
        for answer, status in (
            (await served.http.get("/v2/nothing"), 404),
            (await served.http.get(CHAT), 405),
        ):
            assert answer.status_code == status
            assert answer.json()["error"]["message"]


@in_loop
async def test_a_tokenizer_without_chat_tokens_still_serves_completions(tmp_path: Path) -> None:
    engine = FakeEngine()
    held = json.loads(engine.tokenizer.to_str())
    held["added_tokens"] = [t for t in held["added_tokens"] if t["content"] != "<｜System｜>"]
    engine.tokenizer = engine.tokenizer.from_str(json.dumps(held))
    async with serving(engine) as served:
        refused = await served.post(CHAT, chat_body())
        assert refused.status_code == 400
        assert "/v1/completions" in refused.json()["error"]["message"]
        answer = await served.post(COMPLETIONS, {"model": "mini", "prompt": "x"})
        assert answer.json()["choices"][0]["text"] == "Hello."


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"temperature": "hot"}', '{"top_p": 0}', '{"temperature": 9}']
)
def test_a_broken_generation_config_is_one_clear_line(tmp_path: Path, text: str) -> None:
    from launch.server.sampling_defaults import SamplingDefaults

    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        SamplingDefaults.load(tmp_path)


@in_loop
async def test_a_dead_engine_is_a_503_with_its_reason() -> None:
    from protocol.errors import ProcessDied

    engine = FakeEngine()
    async with serving(engine) as served:
        engine.failure = ProcessDied("compute ended: killed by SIGKILL")
        for answer in (
            await served.post(CHAT, chat_body()),
            await served.http.get("/stats"),
            await served.http.get("/metrics"),
        ):
            assert answer.status_code == 503
            assert "SIGKILL" in answer.json()["error"]["message"]
        health = await served.http.get("/health")
        assert health.status_code == 503 and "SIGKILL" in health.json()["reason"]
        assert isinstance(health, httpx.Response)


@in_loop
async def test_a_count_in_a_query_that_is_no_number_is_an_internal_error() -> None:
    async with serving(FakeEngine()) as served:
        for count in ("\u00b2", "\u0663", "9" * 5000, "-1", "x"):
            answer = await served.http.post("/trace", params={"tokens": count})
            assert answer.status_code == 400, count
            answer = await served.http.get("/stats", params={"history": count})
            assert answer.status_code == 200, count


@in_loop
async def test_a_client_that_leaves_within_its_body_fills_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with serving(FakeEngine()) as served:
        host, port = served.host_port
        for _ in range(3):
            _, writer = await asyncio.open_connection(host, port)
            writer.write(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{".encode()
            )
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        # Served after them, so that they have been noticed.
        await served.chat()
    assert "Traceback" not in capfd.readouterr().err


@in_loop
async def test_a_websocket_is_advice_to_install_a_library(
    capfd: pytest.CaptureFixture[str],
) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    async with serving(FakeEngine()) as served:
        assert (await served.http.get("/health", headers=upgrade)).status_code == 200
    assert "pip install" not in capfd.readouterr().err
