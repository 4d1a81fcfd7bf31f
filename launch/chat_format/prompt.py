"""From a conversation to the token ids the model continues.

Promises: control tokens come from the roles alone; text between two of them is encoded as one
string, exactly as the model's own encoder would see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from launch.chat_format.conversation import Conversation, Message
from launch.chat_format.dsml import (
    Piece,
    Special,
    begin_call,
    to_json,
    write_calls,
    write_tools,
)
from launch.chat_format.vocabulary import ChatTokens, Vocabulary
from protocol.errors import UsageError

BOS, EOS = Special("bos"), Special("eos")
SYSTEM, USER, ASSISTANT = Special("system"), Special("user"), Special("assistant")
REMINDER = Special("reminder")
THINK, THINK_END = Special("think"), Special("think_end")


def encode_prompt(
    conversation: Conversation, vocabulary: Vocabulary, tokens: ChatTokens
) -> list[int]:
    """Token ids up to where the reply begins. Raises UsageError for what cannot be written."""
    return encode_pieces(render(conversation), vocabulary, tokens)


def encode_pieces(pieces: Iterable[Piece], vocabulary: Vocabulary, tokens: ChatTokens) -> list[int]:
    """Token ids of `pieces`, neighbouring texts joined first."""
    ids: list[int] = []
    text: list[str] = []

    def flush() -> None:
        if text:
            ids.extend(vocabulary.encode("".join(text)))
            text.clear()

    for piece in pieces:
        if isinstance(piece, str):
            text.append(piece)
            continue
        flush()
        number: int | None = getattr(tokens, piece.name)
        if number is None:
            raise UsageError(f"this checkpoint's tokenizer has no token for a {piece.name}")
        ids.append(number)
    flush()
    return ids


def render(conversation: Conversation) -> Iterator[Piece]:
    """The prompt's pieces, in order."""
    thinking = conversation.effort is not None
    # Tool use is one long chain of thought: its earlier reasoning stays as long as tools do.
    keep_all = bool(conversation.tools) or any(m.tool_calls for m in conversation.messages)
    last_user = max(
        (i for i, m in enumerate(conversation.messages) if m.role in ("user", "developer")),
        default=-1,
    )
    yield BOS
    yield from _opening(conversation)
    for index, message in enumerate(conversation.messages):
        match message.role:
            case "assistant":
                keep = thinking and (keep_all or index > last_user)
                yield from _assistant_turn(message, keep)
            case "tool":
                yield from _tool_results(conversation.messages, index)
            case "user" if _follows_tool(conversation.messages, index):
                yield f"\n\n{message.text}"
            case "user" | "developer":
                yield from (USER, message.text)
            case "system" if index > 0:  # the first one is in the opening
                yield from (SYSTEM, message.text)
            case "latest_reminder":
                yield from (REMINDER, message.text)
    yield from _reply_header(conversation)


def _opening(conversation: Conversation) -> Iterator[Piece]:
    """The system turn at the start: effort, text, tools, format; nothing where all are absent."""
    first = conversation.messages[0]
    sections: list[list[Piece]] = []
    if first.role == "system" and first.text:
        sections.append([first.text])
    if conversation.tools:
        sections.append(list(write_tools(conversation.tools)))
    if conversation.schema is not None:
        sections.append(
            [
                "## Response Format\n\nThe reply has to be one JSON value that follows this "
                f"schema, and nothing else:\n{to_json(conversation.schema)}"
            ]
        )
    if conversation.effort is None and not sections and first.role != "system":
        return
    yield SYSTEM
    if conversation.effort is not None:
        yield f"Reasoning Effort: {conversation.effort} (range 1-100, the higher the value, "
        yield "the more thorough the reasoning)\n\n"
    for number, section in enumerate(sections):
        yield from ("\n\n",) if number else ()
        yield from section


def _assistant_turn(message: Message, keep_reasoning: bool) -> Iterator[Piece]:
    yield ASSISTANT
    if keep_reasoning and message.reasoning:
        yield from (THINK, message.reasoning)
    yield from (THINK_END, message.text)
    if message.tool_calls:
        yield from write_calls(message.tool_calls)
    yield EOS


def _follows_tool(messages: Sequence[Message], index: int) -> bool:
    return index > 0 and messages[index - 1].role == "tool"


def _tool_results(messages: Sequence[Message], index: int) -> Iterator[Piece]:
    """All results of one reply's calls in one user turn, ordered as the calls were; written at the
    first of them."""
    if _follows_tool(messages, index):
        return
    results = []
    for message in messages[index:]:
        if message.role != "tool":
            break
        results.append(message)
    order: dict[str, int] = {}
    for message in messages[:index]:
        for call in message.tool_calls:
            order[call.identity] = len(order)
    results.sort(key=lambda result: order[result.answers])
    yield USER
    yield "\n\n".join(f"<tool_result>{result.text}</tool_result>" for result in results)


def _reply_header(conversation: Conversation) -> Iterator[Piece]:
    yield ASSISTANT
    if conversation.force_call is not None:
        # A call can only be forced where the answer begins, so there is no reasoning before it.
        yield THINK_END
        yield from begin_call(conversation.force_call)
    else:
        yield THINK if conversation.effort is not None else THINK_END
