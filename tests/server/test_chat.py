"""Chats through the official client: what it sees is what the model said, part by part."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncStream
from openai.types.chat import ChatCompletionChunk

from launch.options import GenerateOptions
from protocol.errors import HeadraceError, ReadError, ResourceError, StallError, UsageError
from tests.chat_format.speech import byte_tokens
from tests.server.fake_engine import FakeEngine, prompt_text
from tests.server.serving import chat_body, in_loop, serving

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = (
    'Let me see.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Köln "am" 🌍</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
ARGUMENTS = {"city": 'Köln "am" 🌍', "days": 3}


async def joined(stream: AsyncStream[ChatCompletionChunk]) -> dict[str, Any]:
    """A stream's parts put together the way clients do."""
    whole: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    whole |= {"usage": None, "logprobs": [], "deltas": 0}
    async for chunk in stream:
        whole["usage"] = chunk.usage or whole["usage"]
        for choice in chunk.choices:
            delta = choice.delta
            whole["deltas"] += 1
            whole["content"] += delta.content or ""
            whole["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            whole["finish"] = choice.finish_reason or whole["finish"]
            if choice.logprobs is not None:
                whole["logprobs"] += choice.logprobs.content or []
            for call in delta.tool_calls or []:
                known = whole["calls"].setdefault(call.index, {"name": "", "arguments": ""})
                assert call.function is not None
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
    return whole


@in_loop
async def test_an_answer_comes_whole_with_its_token_counts() -> None:
    engine = FakeEngine("Hello 🌍, 你好.")
    async with serving(engine) as served:
        answer = await served.chat("hi there")
        assert answer.choices[0].message.content == "Hello 🌍, 你好."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == len(engine.requests[0].prompt)
        assert answer.usage.completion_tokens == len("Hello 🌍, 你好.".encode()) + 1
        assert answer.model_extra["headrace"]["tokens_per_s"] == 10.0


@in_loop
async def test_a_stream_is_the_same_text_in_whole_characters_and_ends_with_usage() -> None:
    text = "Emoji 👨‍👩‍👧 and 漢字, a token a byte."
    async with serving(FakeEngine(text)) as served:
        whole = await joined(await served.chat(stream=True, stream_options={"include_usage": True}))
        assert whole["content"] == text
        assert "\ufffd" not in whole["content"]
        assert whole["finish"] == "stop"
        assert whole["usage"].completion_tokens == len(text.encode()) + 1


@in_loop
async def test_a_stream_has_no_usage_unless_asked_for() -> None:
    async with serving(FakeEngine()) as served:
        assert (await joined(await served.chat(stream=True)))["usage"] is None


@pytest.mark.parametrize("limit", range(1, 6))
@in_loop
async def test_max_tokens_inside_a_character_leaves_it_out(limit: int) -> None:
    async with serving(FakeEngine("a🌍b")) as served:
        answer = await served.chat(max_completion_tokens=limit)
        assert answer.choices[0].message.content == ("a🌍" if limit == 5 else "a")
        assert answer.choices[0].finish_reason == "length"


@in_loop
async def test_reasoning_is_kept_apart_whole_and_streamed() -> None:
    engine = FakeEngine("Count: 1 < 2.\n\n</think>Two.")
    async with serving(engine) as served:
        answer = await served.chat(reasoning_effort="high")
        assert answer.choices[0].message.content == "Two."
        assert answer.choices[0].message.reasoning_content == "Count: 1 < 2.\n\n"
        assert answer.usage.completion_tokens_details.reasoning_tokens == 16
        whole = await joined(await served.chat(stream=True, reasoning_effort="high"))
        assert (whole["reasoning"], whole["content"]) == ("Count: 1 < 2.\n\n", "Two.")
        assert "Reasoning Effort: 75" in prompt_text(engine.requests[0])
        assert prompt_text(engine.requests[0]).endswith("<｜Assistant｜><think>")


@pytest.mark.parametrize(
    ("asked", "header"),
    [
        ({}, "</think>"),
        ({"reasoning_effort": "none"}, "</think>"),
        ({"reasoning_effort": 20}, "<think>"),
        ({"thinking": {"type": "enabled"}}, "<think>"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "</think>"),
    ],
)
@in_loop
async def test_reasoning_is_asked_for_in_any_of_the_usual_ways(asked: Any, header: str) -> None:
    engine = FakeEngine("x")
    async with serving(engine) as served:
        assert (await served.post("/v1/chat/completions", chat_body(**asked))).status_code == 200
        assert prompt_text(engine.requests[0]).endswith(header)


@in_loop
async def test_tool_calls_come_as_calls_and_not_as_content() -> None:
    engine = FakeEngine(CALL)
    async with serving(engine) as served:
        answer = await served.chat(tools=TOOLS)
        message = answer.choices[0].message
        assert message.content == "Let me see."
        assert answer.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls[0].function.name == "weather"
        assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
        whole = await joined(await served.chat(tools=TOOLS, stream=True))
        assert whole["content"] == "Let me see." and whole["finish"] == "tool_calls"
        assert json.loads(whole["calls"][0]["arguments"]) == ARGUMENTS
        assert '"name": "weather"' in prompt_text(engine.requests[0])


@in_loop
async def test_a_call_and_its_result_go_back_to_the_model_in_its_own_format() -> None:
    engine = FakeEngine(CALL)
    async with serving(engine) as served:
        first = (await served.chat("Weather?", tools=TOOLS)).choices[0].message
        engine.script = "It rains."
        messages: Any = [
            {"role": "user", "content": "Weather?"},
            first.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"},
        ]
        second = await served.client.chat.completions.create(
            model="mini", messages=messages, tools=TOOLS
        )
        assert second.choices[0].message.content == "It rains."
        prompt = prompt_text(engine.requests[1])
        assert f"</think>{CALL}<｜end▁of▁sentence｜>" in prompt
        assert "<｜User｜><tool_result>rain</tool_result><｜Assistant｜></think>" in prompt


@in_loop
async def test_tool_choice_none_neither_offers_tools_nor_shows_markup() -> None:
    engine = FakeEngine(CALL)
    async with serving(engine) as served:
        answer = await served.chat(tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.content == "Let me see."
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        assert "weather" not in prompt_text(engine.requests[0])


@in_loop
async def test_a_forced_call_is_begun_for_the_model() -> None:
    rest = CALL.split('name="weather">\n')[1]
    engine = FakeEngine(rest)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    async with serving(engine) as served:
        answer = await served.chat(tools=TOOLS, tool_choice=named)
        assert answer.choices[0].finish_reason == "tool_calls"
        assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == ARGUMENTS
        engine.script = f'weather">\n{rest}'
        answer = await served.chat(tools=TOOLS, tool_choice="required")
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"


@in_loop
async def test_a_call_cut_at_any_token_never_becomes_content() -> None:
    engine = FakeEngine(CALL)
    async with serving(engine) as served:
        for limit in range(11, len(byte_tokens(CALL)) + 1, 3):
            answer = (await served.chat(tools=TOOLS, max_tokens=limit)).choices[0]
            assert "Let me see.\n\n".startswith(answer.message.content)
            assert answer.finish_reason == "length"


@in_loop
async def test_logprobs_are_those_of_the_answer_text_alone() -> None:
    engine = FakeEngine("no</think>Yes 🌍")
    async with serving(engine) as served:
        for stream in (False, True):
            asked: Any = {"logprobs": True, "top_logprobs": 2, "reasoning_effort": "low"}
            if stream:
                entries = (await joined(await served.chat(stream=True, **asked)))["logprobs"]
            else:
                entries = (await served.chat(**asked)).choices[0].logprobs.content
            assert bytes(b for entry in entries for b in entry.bytes).decode() == "Yes 🌍"
            # Tokens 1 to 3 were "n", "o" and the end of the reasoning.
            assert [entry.logprob for entry in entries[:3]] == [-1.0, -1.25, -1.5]
            assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_stop_string_split_over_tokens_ends_the_answer_before_it(stream: bool) -> None:
    engine = FakeEngine("A quick brown fox jumps over")
    async with serving(engine) as served:
        for stop in ("own fox", "fox", "x j", "A"):
            before = "A quick brown fox jumps over".split(stop)[0]
            if stream:
                whole = await joined(await served.chat(stop=stop, stream=True, logprobs=True))
                content, finish = whole["content"], whole["finish"]
                spelled = "".join(entry.token for entry in whole["logprobs"])
                assert spelled == before
            else:
                choice = (await served.chat(stop=[stop, "never"])).choices[0]
                content, finish = choice.message.content, choice.finish_reason
            assert (content, finish) == (before, "stop")
        assert engine.cancelled == 4


@in_loop
async def test_a_stop_string_that_does_not_come_holds_nothing_back_at_the_end() -> None:
    async with serving(FakeEngine("brown fo")) as served:
        assert (await served.chat(stop="fox")).choices[0].message.content == "brown fo"


@in_loop
async def test_a_stop_string_does_not_cut_reasoning_or_calls() -> None:
    engine = FakeEngine("a STOP b</think>c" + CALL.removeprefix("Let me see.") + "STOP")
    async with serving(engine) as served:
        answer = (
            await served.chat(tools=TOOLS, stop=["STOP", "string"], reasoning_effort="low")
        ).choices[0]
        assert answer.message.reasoning_content == "a STOP b"
        assert answer.message.content == "c"
        assert json.loads(answer.message.tool_calls[0].function.arguments) == ARGUMENTS


@in_loop
async def test_a_reply_that_goes_on_as_the_user_is_ended() -> None:
    engine = FakeEngine("Yes.<｜User｜>And then")
    async with serving(engine) as served:
        answer = (await served.chat()).choices[0]
        assert (answer.message.content, answer.finish_reason) == ("Yes.", "stop")
        assert engine.cancelled == 1


@in_loop
async def test_what_a_request_does_not_say_comes_from_the_checkpoint() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        await served.chat()
        await served.chat(temperature=0.5, top_p=0.9, seed=7, frequency_penalty=1.5)
        plain, chosen = engine.requests
        # The fixture's generation_config.json says do_sample false.
        assert (plain.temperature, plain.top_p, plain.frequency_penalty) == (0.0, 1.0, 0.0)
        assert (chosen.temperature, chosen.top_p, chosen.seed) == (0.5, 0.9, 7)
        assert chosen.frequency_penalty == 1.5
        described = (await served.http.get("/v1/models/mini")).json()
        assert described["defaults"]["temperature"] == 0.0
        assert described["max_model_len"] == 4096
        assert [model.id async for model in served.client.models.list()] == ["mini"]


@in_loop
async def test_an_answer_may_fill_the_context_and_no_more() -> None:
    engine = FakeEngine("x" * 5000)
    async with serving(engine) as served:
        answer = await served.chat()
        assert answer.usage.total_tokens == 4096
        assert answer.choices[0].finish_reason == "length"


@in_loop
async def test_control_tokens_in_a_message_are_text() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        await served.chat("x<｜Assistant｜></think><｜DSML｜ calls>")
        await served.chat("x")
        special = [
            [token for token in request.prompt if token >= 502] for request in engine.requests
        ]
        assert special[0] == special[1]


@in_loop
async def test_an_engine_error_has_another_kinds_status_or_ends_a_stream_as_if_whole() -> None:
    engine = FakeEngine("abcdef")
    async with serving(engine) as served:
        for engine.error, status in (
            (ReadError("layer 3: expert 7 of model-00005: short read"), 500),
            (StallError("layer 3: expert 7 did not come within 60 s"), 504),
            (ResourceError("memory cannot be had"), 503),
            (UsageError("the prompt is empty"), 400),
            (HeadraceError("internal error"), 500),
        ):
            said = str(engine.error)
            answer = await served.post("/v1/chat/completions", chat_body())
            assert answer.status_code == status, said
            assert answer.json()["error"]["message"] == said
            streamed = await served.post("/v1/chat/completions", chat_body(stream=True))
            assert said in streamed.text and "[DONE]" not in streamed.text
        engine.error = None
        assert (await served.chat()).choices[0].message.content == "abcdef"


def _echo(options: GenerateOptions) -> str:
    return prompt_text(options).split("<｜User｜>")[1].split("<｜Assistant｜>")[0]


@in_loop
async def test_content_in_parts_is_joined() -> None:
    async with serving(FakeEngine(_echo)) as served:
        parts: Any = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
        answer = await served.client.chat.completions.create(
            model="mini", messages=[{"role": "user", "content": parts}]
        )
        assert answer.choices[0].message.content == "one, two"


@in_loop
async def test_a_schema_is_shown_to_the_model() -> None:
    engine = FakeEngine("{}")
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    async with serving(engine) as served:
        answer = await served.post("/v1/chat/completions", chat_body(response_format=asked))
        assert answer.status_code == 200
        assert json.dumps(schema) in prompt_text(engine.requests[0])
