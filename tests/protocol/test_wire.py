"""Every message survives the wire, and nothing else does."""

from __future__ import annotations

import random
import typing
from dataclasses import dataclass, fields

import msgpack
import pytest

from protocol import messages, specs
from protocol.wire import VERSION, MalformedMessage, Message, decode, message

EVERY = [
    kind
    for module in (messages, specs)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
]
NAMES = [kind.__name__ for kind in EVERY]


def _value(hint: typing.Any, draw: random.Random) -> typing.Any:
    """A value of a field's type, from the whole of its range."""
    if hint is int:
        return draw.choice([0, 1, -1, 1 << 40, (1 << 63) - 1, -(1 << 63)])
    if hint is float:
        return draw.choice([0.0, -1.5, 1e300, 3])
    if hint is str:
        return draw.choice(["", "reader-0", "ünï ｜DSML｜ \n"])
    if hint is bool:
        return draw.choice([False, True])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return draw.choice(arguments)
    if origin is list:
        return [_value(arguments[0], draw) for _ in range(draw.choice([0, 1, 5]))]
    if origin is dict:
        return {f"key {i}": _value(arguments[1], draw) for i in range(draw.choice([0, 3]))}
    return draw.choice([None, _value(arguments[0], draw)])


def _example(kind: type[Message], seed: int = 0) -> Message:
    draw, hints = random.Random(seed), typing.get_type_hints(kind)
    return kind(**{field.name: _value(hints[field.name], draw) for field in fields(kind)})


@pytest.mark.parametrize("kind", EVERY, ids=NAMES)
def test_a_message_arrives_as_it_was_sent(kind: type[Message]) -> None:
    for seed in range(20):
        sent = _example(kind, seed)
        assert decode(sent.encode(), [kind]) == sent


def test_no_two_messages_share_a_code() -> None:
    codes = [kind.CODE for kind in EVERY]
    assert len(set(codes)) == len(codes)
    with pytest.raises(ValueError, match="taken by"):

        @message(codes[0])
        @dataclass(frozen=True, slots=True)
        class Second(Message):
            pass


@pytest.mark.parametrize("kind", EVERY, ids=NAMES)
def test_a_message_the_receiver_does_not_expect_is_refused(kind: type[Message]) -> None:
    others = [other for other in EVERY if other is not kind]
    with pytest.raises(MalformedMessage, match="not expected"):
        decode(_example(kind).encode(), others)


@pytest.mark.parametrize("kind", EVERY, ids=NAMES)
def test_a_field_too_few_or_too_many_is_refused(kind: type[Message]) -> None:
    frame = _example(kind).encode()
    values = msgpack.unpackb(frame[2:])
    for wrong in (values[:-1], [*values, 0]):
        if wrong != values:
            with pytest.raises(MalformedMessage, match="does not have"):
                decode(frame[:2] + msgpack.packb(wrong), [kind])


@pytest.mark.parametrize("kind", [kind for kind in EVERY if fields(kind)], ids=lambda k: k.__name__)
def test_a_field_of_another_type_is_refused_by_its_name(kind: type[Message]) -> None:
    frame, hints = _example(kind).encode(), typing.get_type_hints(kind)
    values = msgpack.unpackb(frame[2:])
    for place, field in enumerate(fields(kind)):
        for wrong in ({"a": b"b"}, [[["deep"]]], b"bytes"):
            damaged = [*values[:place], wrong, *values[place + 1 :]]
            with pytest.raises(MalformedMessage, match=rf"{kind.__name__}\.{field.name}"):
                decode(frame[:2] + msgpack.packb(damaged), [kind])
        # A flag is no number and a number no flag: msgpack would let either through.
        if hints[field.name] in (int, bool):
            wrong = 1 if hints[field.name] is bool else True
            damaged = [*values[:place], wrong, *values[place + 1 :]]
            with pytest.raises(MalformedMessage, match=rf"{kind.__name__}\.{field.name}"):
                decode(frame[:2] + msgpack.packb(damaged), [kind])


def test_another_protocol_version_is_named() -> None:
    frame = bytearray(messages.Stop().encode())
    frame[0] = VERSION + 1
    with pytest.raises(MalformedMessage, match=f"version {VERSION + 1}, this process speaks"):
        decode(frame, [messages.Stop])


@pytest.mark.parametrize("frame", [b"", b"\x01", bytes((VERSION, 255)), bytes((VERSION, 0))])
def test_a_frame_without_a_known_message_is_refused(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(frame, EVERY)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # never used by msgpack
        b"\x93\x01",  # three values announced, one there
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion values that are not there
        b"\xdb\xff\xff\xff\xff",  # a string of 4 GiB that is not there
        b"\x91" * 2000,  # nested deeper than any message
        b"\x01",  # not an array
        b"\x90\x00",  # something after the end
        b"\x93\xa1\xff\x01\x01",  # text that is not UTF-8
    ],
)
def test_a_body_that_is_not_msgpack_of_its_fields_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(bytes((VERSION, messages.Hello.CODE)) + body, [messages.Hello])


def test_a_kind_of_failure_that_nobody_knows_is_refused() -> None:
    ended = ["error", "", "slow", "stall", 4, 0, 0, {}]
    frame = bytes((VERSION, messages.Finished.CODE))
    known = decode(frame + msgpack.packb([1, *ended]), [messages.Finished])
    assert known == messages.Finished(1, *ended)
    for kind in ("bored", None, 7, ["stall"]):
        ended[3] = kind
        with pytest.raises(MalformedMessage, match=r"Finished\.failure"):
            decode(frame + msgpack.packb([1, *ended]), [messages.Finished])


def test_random_damage_never_does_anything_but_refuse() -> None:
    draw = random.Random(7)
    frames = [bytearray(_example(kind, 3).encode()) for kind in EVERY]
    for _ in range(5000):
        frame = bytearray(draw.choice(frames))
        for _ in range(draw.randint(1, 4)):
            frame[draw.randrange(len(frame))] = draw.randrange(256)
        try:
            decoded = decode(frame[: draw.randint(0, len(frame))], EVERY)
        except MalformedMessage:
            continue
        assert isinstance(decoded, Message)


def test_a_message_over_its_limit_is_refused_by_sender_and_receiver() -> None:
    large = messages.Loading("compute", "x" * messages.Loading.MAX_BYTES, 0.5)
    with pytest.raises(MalformedMessage, match="more than"):
        large.encode()
    body = msgpack.packb(["compute", large.what, 0.5])
    with pytest.raises(MalformedMessage, match="more than"):
        decode(bytes((VERSION, large.CODE)) + body, [messages.Loading])


def test_the_longest_prompt_of_the_released_model_fits() -> None:
    prompt = [129_279] * 1_048_576
    sent = messages.EngramRequest(1, 0, prompt, [0, 1, 2])
    assert decode(sent.encode(), [messages.EngramRequest]) == sent


@pytest.mark.parametrize("value", [1 << 64, object(), "\ud800", {1, 2}])
def test_what_msgpack_cannot_carry_is_refused_where_it_is_sent(value: object) -> None:
    with pytest.raises(MalformedMessage, match="cannot be sent"):
        messages.Loading(value, "what", 0.0).encode()  # type: ignore[arg-type]
