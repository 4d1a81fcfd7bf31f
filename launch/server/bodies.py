"""Request bodies as clients send them, checked field by field.

Owns which fields exist and what they may hold. Fields that would change the answer and are not
served are refused by name; others that clients are known to send are ignored.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from compute.text import MAX_STOP_CHARACTERS, MAX_STOPS
from launch.chat_format.conversation import EFFORTS
from launch.server.errors import ApiError
from protocol.messages import MAX_LOGPROBS

INT64 = 1 << 63


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("value", "{message}", {"message": message})


def _only(*allowed: Any) -> Any:
    """A field that exists for clients that send its neutral value."""

    def check(value: Any) -> Any:
        if value not in allowed:
            served = " or ".join(json.dumps(value) for value in allowed)
            raise _wrong(f"is {json.dumps(value)[:100]}, only {served} is served")
        return value

    return BeforeValidator(check)


def _plain_text(value: Any) -> Any:
    """Message content: a string, or parts of type text, which are joined."""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text"):
            kind = part.get("type") if isinstance(part, dict) else part
            raise _wrong(f"part {index} is of type {kind!r}; this engine reads only 'text' parts")
        if not isinstance(part.get("text"), str):
            raise _wrong(f"part {index} has no text")
        texts.append(part["text"])
    return "".join(texts)


def _stop_list(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong("expected a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _wrong(f"has {len(stops)} strings, expected at most {MAX_STOPS}")
    if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise _wrong(f"a string has to have 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _seed(value: int) -> int:
    if not -INT64 <= value < INT64:
        raise _wrong("expected a whole number of 64 bits")
    return value


class Body(BaseModel):
    """Strict: "1" is not a number. Fields that are not named here are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


Text = Annotated[str, BeforeValidator(_plain_text)]
Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Body):
    include_usage: bool = False


class Sampling(Body):
    """What both endpoints share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 30)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, AfterValidator(_seed)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_list)] = []
    n: Annotated[Any, _only(1, None)] = None
    logit_bias: Annotated[Any, _only({}, None)] = None


class CompletionBody(Sampling):
    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Annotated[Any, _only(False, None)] = None
    suffix: Annotated[Any, _only("", None)] = None
    best_of: Annotated[Any, _only(1, None)] = None

    def prompt_parts(self) -> str | list[int]:
        """The one prompt: text, or token ids. Raises ApiError."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return prompt
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return prompt
        message = "expected one string or one list of token ids, not empty"
        raise ApiError(400, f"prompt: {message}", param="prompt")


class FunctionCall(Body):
    name: str
    arguments: str


class CallBody(Body):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: Text | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None


class FunctionSchema(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionSchema


class Thinking(Body):
    type: Literal["enabled", "disabled"]


def _effort(value: Any) -> Any:
    known = isinstance(value, str) and value in ("none", *EFFORTS)
    number = type(value) is int and 1 <= value <= 100
    if value is not None and not known and not number:
        raise _wrong(f"expected none, {', '.join(EFFORTS)}, or a whole number from 1 to 100")
    return value


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("auto", "none", "required"):
        return value
    is_function = isinstance(value, dict) and value.get("type") == "function"
    function = value.get("function") if is_function else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _wrong(
            'expected "auto", "none", "required" or {"type": "function", "function": {"name": …}}'
        )
    return value


def _response_format(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind in ("text", "json_object"):
        return value
    holder = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict):
        raise _wrong("expected type text, json_object, or json_schema with json_schema.schema")
    return value


class ChatBody(Sampling):
    messages: list[MessageBody]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Annotated[Any, BeforeValidator(_tool_choice)] = None
    reasoning_effort: Annotated[Any, BeforeValidator(_effort)] = None
    thinking: Thinking | None = None
    response_format: Annotated[Any, BeforeValidator(_response_format)] = None
    functions: Annotated[Any, _only([], None)] = None
    function_call: Annotated[Any, _only("none", "auto", None)] = None
    modalities: Annotated[Any, _only(["text"], None)] = None


Parsed = TypeVar("Parsed", bound=Body)


def parse_body(raw: bytes, kind: type[Parsed]) -> Parsed:
    """The body as `kind`; raises ApiError 400 naming the first field that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False)[0]) from None


def _as_api_error(found: ErrorDetails) -> ApiError:
    if found["type"] == "json_invalid":
        reason = found["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"the body is not JSON: {reason}")
    field = ""
    for part in found["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    message = found["msg"][0].lower() + found["msg"][1:]
    if not field:
        return ApiError(400, "the body is not a JSON object")
    return ApiError(400, f"{field}: {message}", param=field)
