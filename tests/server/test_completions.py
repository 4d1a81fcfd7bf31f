"""Plain completions: text continued as it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine, prompt_text
from tests.server.serving import in_loop, serving


@in_loop
async def test_text_is_continued_whole_and_streamed() -> None:
    engine = FakeEngine(" upon a time 🌍")
    async with serving(engine) as served:
        answer = await served.client.completions.create(model="mini", prompt="Once", max_tokens=100)
        assert answer.choices[0].text == " upon a time 🌍"
        assert answer.choices[0].finish_reason == "stop"
        assert prompt_text(engine.requests[0]) == "<｜begin▁of▁sentence｜>Once"
        text = ""
        stream = await served.client.completions.create(
            model="mini", prompt="Once", max_tokens=100, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].text
        assert text == " upon a time 🌍"


@in_loop
async def test_token_ids_are_taken_as_they_are() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        for prompt in ([5, 6, 503], [[5, 6, 503]]):
            await served.client.completions.create(model="mini", prompt=prompt)
            assert engine.requests[-1].prompt == [5, 6, 503]
        await served.client.completions.create(model="mini", prompt=["a <think>"])
        assert not {506} & set(engine.requests[-1].prompt)


@in_loop
async def test_the_default_limit_is_that_of_the_api() -> None:
    async with serving(FakeEngine("x" * 50)) as served:
        answer = await served.client.completions.create(model="mini", prompt="a")
        assert answer.choices[0].text == "x" * 16


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_logprobs_come_with_text_offsets(stream: bool) -> None:
    async with serving(FakeEngine("a🌍b")) as served:
        asked: Any = {"model": "mini", "prompt": "x", "logprobs": 1, "stream": stream}
        if stream:
            entries: list[Any] = []
            async for chunk in await served.client.completions.create(**asked):
                if chunk.choices[0].logprobs:
                    entries.append(chunk.choices[0].logprobs)
            offsets = [offset for entry in entries for offset in entry.text_offset]
            values = [value for entry in entries for value in entry.token_logprobs]
        else:
            found = (await served.client.completions.create(**asked)).choices[0].logprobs
            assert found.tokens[0] == "a" and found.top_logprobs[0] == {"a": -0.25}
            offsets, values = found.text_offset, found.token_logprobs
        assert offsets == [0, 1, 1, 1, 1, 2]
        assert values == [-0.25 * count for count in range(1, 7)]


@in_loop
async def test_a_stop_string_over_three_tokens() -> None:
    engine = FakeEngine("one two three")
    async with serving(engine) as served:
        answer = await served.client.completions.create(model="mini", prompt="x", stop="two")
        assert answer.choices[0].text == "one "
        assert engine.made <= len("one two") + 1
