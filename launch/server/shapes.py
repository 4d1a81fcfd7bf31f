"""The JSON of answers, whole and in chunks, for both endpoints of the OpenAI API."""

from __future__ import annotations

import secrets
import time
from typing import Any, Protocol

from compute.text import TokenBytes
from launch.chat_format.reply import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    ReasoningDelta,
)
from launch.server.answers import Batch, Outcome, TokenLogprob

JSON = dict[str, Any]


class Shape(Protocol):
    """How one answer looks on the wire."""

    def opening(self) -> list[JSON]:
        """Chunks before the first token."""
        ...

    def chunks(self, batch: Batch) -> list[JSON]:
        """Chunks of a stream."""
        ...

    def closing(self, outcome: Outcome, include_usage: bool) -> list[JSON]:
        """The stream's last chunks."""
        ...

    def whole(self, batch: Batch, outcome: Outcome) -> JSON:
        """The answer as one object; `batch` has everything."""
        ...


def usage(outcome: Outcome) -> JSON:
    """Token counts, with what was reused and what was reasoning."""
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": outcome.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": outcome.reasoning_tokens},
    }


class _Named:
    """What all objects of one answer share. `headrace` holds the engine's figures for it."""

    def __init__(self, prefix: str, kind: str, model: str, token_bytes: TokenBytes) -> None:
        self._base = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._token_bytes = token_bytes

    def _spelled(self, token: int) -> str:
        return self._token_bytes.of(token).decode("utf-8", "replace")

    def _object(self, choice: JSON, **more: Any) -> JSON:
        return {**self._base, "choices": [{"index": 0, **choice}], **more}

    def _usage_chunk(self, outcome: Outcome) -> JSON:
        return {
            **self._base,
            "choices": [],
            "usage": usage(outcome),
            "headrace": outcome.figures,
        }


class ChatShape(_Named):
    """`/v1/chat/completions`."""

    def __init__(self, model: str, token_bytes: TokenBytes, *, stream: bool) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__("chatcmpl", kind, model, token_bytes)

    def opening(self) -> list[JSON]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def chunks(self, batch: Batch) -> list[JSON]:
        chunks = [self._chunk(_chat_delta(delta)) for delta in batch.deltas]
        if batch.logprobs:
            # They belong to answer text; where its chunk is not here, they come by themselves.
            holders = [c for c in chunks if "content" in c["choices"][0]["delta"]]
            chunks += [] if holders else [self._chunk({})]
            holder = (holders or chunks)[-1]
            holder["choices"][0]["logprobs"] = self._logprobs(batch.logprobs)
        return chunks

    def closing(self, outcome: Outcome, include_usage: bool) -> list[JSON]:
        final = self._object({"delta": {}, "finish_reason": outcome.finish_reason})
        return [final, *([self._usage_chunk(outcome)] if include_usage else [])]

    def whole(self, batch: Batch, outcome: Outcome) -> JSON:
        reasoning = content = ""
        calls: list[JSON] = []
        for delta in batch.deltas:
            match delta:
                case ReasoningDelta(text):
                    reasoning += text
                case ContentDelta(text):
                    content += text
                case CallStarted(_, identity, name):
                    function = {"name": name, "arguments": ""}
                    calls.append({"id": identity, "type": "function", "function": function})
                case ArgumentsDelta(index, text):
                    calls[index]["function"]["arguments"] += text
        message: JSON = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice: JSON = {"message": message, "finish_reason": outcome.finish_reason}
        choice["logprobs"] = self._logprobs(batch.logprobs) if batch.logprobs else None
        return self._object(choice, usage=usage(outcome), headrace=outcome.figures)

    def _chunk(self, delta: JSON) -> JSON:
        return self._object({"delta": delta, "finish_reason": None})

    def _logprobs(self, entries: list[TokenLogprob]) -> JSON:
        return {
            "content": [
                {
                    **self._entry(entry.token, entry.logprob),
                    "top_logprobs": [self._entry(*alternative) for alternative in entry.top],
                }
                for entry in entries
            ]
        }

    def _entry(self, token: int, logprob: float) -> JSON:
        spelled = list(self._token_bytes.of(token))
        return {"token": self._spelled(token), "logprob": logprob, "bytes": spelled}


def _chat_delta(delta: ReasoningDelta | ContentDelta | CallStarted | ArgumentsDelta) -> JSON:
    match delta:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case CallStarted(index, identity, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": identity, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class CompletionShape(_Named):
    """`/v1/completions`."""

    def __init__(self, model: str, token_bytes: TokenBytes) -> None:
        super().__init__("cmpl", "text_completion", model, token_bytes)

    def opening(self) -> list[JSON]:
        return []

    def chunks(self, batch: Batch) -> list[JSON]:
        return [self._object({**self._text(batch), "finish_reason": None})]

    def closing(self, outcome: Outcome, include_usage: bool) -> list[JSON]:
        final = {"text": "", "logprobs": None, "finish_reason": outcome.finish_reason}
        return [self._object(final), *([self._usage_chunk(outcome)] if include_usage else [])]

    def whole(self, batch: Batch, outcome: Outcome) -> JSON:
        choice = {**self._text(batch), "finish_reason": outcome.finish_reason}
        return self._object(choice, usage=usage(outcome), headrace=outcome.figures)

    def _text(self, batch: Batch) -> JSON:
        text = "".join(delta.text for delta in batch.deltas if isinstance(delta, ContentDelta))
        return {"text": text, "logprobs": self._logprobs(batch.logprobs)}

    def _logprobs(self, entries: list[TokenLogprob]) -> JSON | None:
        if not entries:
            return None
        return {
            "tokens": [self._spelled(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._spelled(token): logprob for token, logprob in entry.top} for entry in entries
            ],
            "text_offset": [entry.offset for entry in entries],
        }
