"""The wire form of a message: one frame of version, type code, and a msgpack array of its fields.

Owns encoding, decoding and every check that needs no context. A frame that is too long, of another
version, of a type the receiver does not expect, or whose fields have the wrong types raises
`MalformedMessage`; receivers count it and go on, so no peer can end another by what it sends.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import msgpack

VERSION = 3
DEFAULT_MAX_BYTES = 64 << 10

Check = Callable[[Any], bool]
M = TypeVar("M", bound="type[Message]")


class MalformedMessage(ValueError):
    """A frame that is no message the receiver accepts; the text says why."""


@dataclass(frozen=True, slots=True)
class Message:
    """Base of every message. Subclasses are registered by `@message`."""

    CODE: ClassVar[int] = 0
    MAX_BYTES: ClassVar[int] = DEFAULT_MAX_BYTES
    CHECKS: ClassVar[tuple[tuple[str, Check], ...]] = ()

    def encode(self) -> bytes:
        """The frame; raises MalformedMessage where a field cannot be packed or all are too long."""
        values = [getattr(self, name) for name, _ in self.CHECKS]
        try:
            frame: bytes = bytes((VERSION, self.CODE)) + msgpack.packb(values, use_bin_type=True)
        except (TypeError, ValueError, OverflowError) as error:
            raise MalformedMessage(f"{type(self).__name__} cannot be sent: {error}") from None
        if len(frame) > self.MAX_BYTES:
            raise MalformedMessage(
                f"{type(self).__name__} has {len(frame)} bytes, more than {self.MAX_BYTES}"
            )
        return frame


_registry: dict[int, type[Message]] = {}


def message(code: int, max_bytes: int = DEFAULT_MAX_BYTES) -> Callable[[M], M]:
    """Class decorator: registers a frozen dataclass as the message with this type code."""

    def register(cls: M) -> M:
        if code in _registry:
            raise ValueError(f"message code {code} is taken by {_registry[code].__name__}")
        hints = typing.get_type_hints(cls)
        cls.CODE = code
        cls.MAX_BYTES = max_bytes
        cls.CHECKS = tuple((field.name, _check_for(hints[field.name])) for field in fields(cls))
        _registry[code] = cls
        return cls

    return register


def decode(frame: bytes | memoryview, expected: Iterable[type[Message]]) -> Message:
    """The message in `frame`, if it is one of `expected`; raises MalformedMessage."""
    if len(frame) < 2:
        raise MalformedMessage(f"a frame of {len(frame)} bytes")
    if frame[0] != VERSION:
        raise MalformedMessage(f"protocol version {frame[0]}, this process speaks {VERSION}")
    cls = _registry.get(frame[1])
    if cls is None or cls not in expected:
        raise MalformedMessage(f"message type {frame[1]} is not expected here")
    if len(frame) > cls.MAX_BYTES:
        raise MalformedMessage(f"{cls.__name__} of {len(frame)} bytes, more than {cls.MAX_BYTES}")
    try:
        # The frame's length bounds every length inside it: that is msgpack's own default.
        values = msgpack.unpackb(memoryview(frame)[2:], raw=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"{cls.__name__} is not msgpack: {error}") from None
    if not isinstance(values, list) or len(values) != len(cls.CHECKS):
        raise MalformedMessage(f"{cls.__name__} does not have {len(cls.CHECKS)} fields")
    for (name, check), value in zip(cls.CHECKS, values, strict=True):
        if not check(value):
            raise MalformedMessage(f"{cls.__name__}.{name} has a value of the wrong type")
    return cls(*values)


def _is_int(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_float(value: Any) -> bool:
    return type(value) is float or type(value) is int


_SCALARS: dict[Any, Check] = {
    int: _is_int,
    float: _is_float,
    str: lambda value: type(value) is str,
    bytes: lambda value: type(value) is bytes,
    bool: lambda value: type(value) is bool,
}


def _check_for(hint: Any) -> Check:
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return lambda value: type(value) is str and value in arguments
    if origin is list:
        inner = _check_for(arguments[0])
        return lambda value: type(value) is list and all(map(inner, value))
    if origin is dict:
        key, item = _check_for(arguments[0]), _check_for(arguments[1])
        return lambda value: (
            type(value) is dict and all(map(key, value)) and all(map(item, value.values()))
        )
    if origin in (typing.Union, types.UnionType):
        options = [_check_for(option) for option in arguments if option is not type(None)]
        nullable = type(None) in arguments
        return lambda value: (nullable and value is None) or any(o(value) for o in options)
    raise TypeError(f"a message field cannot be of type {hint}")
