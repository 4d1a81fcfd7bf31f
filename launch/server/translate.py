"""From a checked body to what the engine computes, with the checkpoint's defaults filled in."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

from launch.chat_format.conversation import (
    DEFAULT_EFFORT,
    EFFORTS,
    Conversation,
    Message,
    ToolCall,
)
from launch.chat_format.prompt import encode_prompt
from launch.chat_format.vocabulary import ChatTokens, Vocabulary
from launch.options import GenerateOptions
from launch.server.bodies import ChatBody, CompletionBody, MessageBody, Sampling, ToolBody
from launch.server.errors import ApiError, bad_field
from launch.server.sampling_defaults import SamplingDefaults
from protocol.config import ModelConfig
from protocol.errors import UsageError

ANY_JSON: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Translator:
    """`context` bounds prompt and answer together; `think` says whether a chat that does not say
    reasons first. `chat_tokens` is None where the tokenizer lacks a chat's control tokens."""

    config: ModelConfig
    vocabulary: Vocabulary
    chat_tokens: ChatTokens | None
    defaults: SamplingDefaults
    context: int
    think: bool

    def conversation(self, body: ChatBody) -> Conversation:
        """Raises ApiError."""
        tools = _offered_tools(body)
        forced = _forced_call(body)
        if forced is not None and forced not in ("", *(tool.function.name for tool in tools)):
            raise bad_field("tool_choice", f"{forced!r} is not among the tools")
        if forced == "" and not tools:
            raise bad_field("tool_choice", "is required, but there are no tools")
        try:
            return Conversation(
                tuple(_message(message, i) for i, message in enumerate(body.messages)),
                tools=tuple(tool.function.model_dump(exclude_none=True) for tool in tools),
                effort=self._effort(body),
                force_call=forced,
                schema=_schema(body),
            )
        except UsageError as error:
            raise ApiError(400, str(error), param="messages") from None

    async def chat_options(self, body: ChatBody, conversation: Conversation) -> GenerateOptions:
        """Raises ApiError, also for a context that overflows."""
        if self.chat_tokens is None:
            raise ApiError(
                400, "this checkpoint's tokenizer has no chat tokens; use /v1/completions"
            )
        try:
            # Seconds for a prompt of a million tokens, and the others' streams must go on.
            prompt = await asyncio.to_thread(
                encode_prompt, conversation, self.vocabulary, self.chat_tokens
            )
        except UsageError as error:
            raise ApiError(400, str(error), param="messages") from None
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_field("top_logprobs", "needs logprobs to be true")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_completion_tokens or body.max_tokens
        return self._options(prompt, body, limit, logprobs, "messages")

    async def completion_options(self, body: CompletionBody) -> GenerateOptions:
        """Raises ApiError."""
        parts = body.prompt_parts()
        if isinstance(parts, str):
            text = await asyncio.to_thread(self.vocabulary.encode, parts)
            prompt = [self.config.bos_token_id, *text]
        else:
            prompt = parts
            for token in (min(prompt), max(prompt)):
                if not 0 <= token < self.config.vocab_size or token == self.config.image_token_id:
                    raise bad_field(
                        "prompt",
                        f"token id {token} is no text token below {self.config.vocab_size}",
                    )
        return self._options(prompt, body, body.max_tokens or 16, body.logprobs, "prompt")

    def _options(
        self,
        prompt: list[int],
        body: Sampling,
        limit: int | None,
        logprobs: int | None,
        param: str,
    ) -> GenerateOptions:
        if body.stream_options is not None and not body.stream:
            raise bad_field("stream_options", "is only for stream: true")
        room = self.context - len(prompt)
        asked = limit or 1
        if room < asked:
            answer = f" and {limit} for the answer" if limit else ""
            raise ApiError(
                400,
                f"this server's context is {self.context} tokens; the request needs "
                f"{len(prompt) + asked} ({len(prompt)} in the {param}{answer}). Shorten it, "
                "or start the server with a larger --max-context",
                param=param,
                code="context_length_exceeded",
            )
        defaults = self.defaults
        top_k = body.top_k if body.top_k is not None else defaults.top_k
        return GenerateOptions(
            prompt,
            max_tokens=limit or room,
            temperature=_given(body.temperature, defaults.temperature),
            top_k=max(0, top_k),
            top_p=_given(body.top_p, defaults.top_p),
            min_p=_given(body.min_p, defaults.min_p),
            seed=body.seed if body.seed is not None else secrets.randbits(63),
            frequency_penalty=_given(body.frequency_penalty, defaults.frequency_penalty),
            presence_penalty=_given(body.presence_penalty, defaults.presence_penalty),
            logprobs=logprobs,
        )

    def _effort(self, body: ChatBody) -> int | None:
        if body.thinking is not None and body.thinking.type == "disabled":
            return None
        effort = body.reasoning_effort
        if effort == "none":
            return None
        if effort is None:
            thinks = body.thinking is not None or self.think
            return DEFAULT_EFFORT if thinks else None
        return effort if isinstance(effort, int) else EFFORTS[effort]


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _offered_tools(body: ChatBody) -> list[ToolBody]:
    return [] if body.tool_choice == "none" else body.tools or []


def _forced_call(body: ChatBody) -> str | None:
    if isinstance(body.tool_choice, dict):
        name: str = body.tool_choice["function"]["name"]
        return name
    return "" if body.tool_choice == "required" else None


def _schema(body: ChatBody) -> dict[str, Any] | None:
    wanted = body.response_format or {"type": "text"}
    if wanted["type"] == "text":
        return None
    schema: dict[str, Any] = wanted.get("json_schema", {}).get("schema", ANY_JSON)
    return schema


def _message(body: MessageBody, index: int) -> Message:
    where = f"messages[{index}]"
    if body.tool_calls and body.role != "assistant":
        raise bad_field(f"{where}.tool_calls", "only the assistant calls tools")
    if body.content is None and body.role != "assistant":
        raise bad_field(f"{where}.content", "is missing")
    if body.role == "tool" and not body.tool_call_id:
        raise bad_field(f"{where}.tool_call_id", "is missing")
    return Message(
        body.role,
        body.content or "",
        reasoning=body.reasoning_content or "",
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in body.tool_calls or ()
        ),
        answers=body.tool_call_id or "",
    )
