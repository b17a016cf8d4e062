"""Messages to bytes and back: msgpack maps, checked field by field against the dataclass on the way in.

A message is `{"v": version, "k": kind, …fields}`. Unknown fields are ignored, so a newer peer may add some; a
missing field, a wrong type or an unknown kind raises `BadMessage`. Nothing is ever looked up by name in a module:
the kinds are one table.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from wire.errors import BadMessage
from wire.messages import PROTOCOL_VERSION, Message
from wire.rank_messages import RankMessage

MAX_MESSAGE_BYTES = 64 << 20
_MAX_ITEMS = 4 << 20
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*get_args(Message), *get_args(RankMessage))}

Reader = Callable[[object, str], Any]
AnyMessage = Message | RankMessage


def encode(message: AnyMessage) -> bytes:
    """The message as bytes."""
    fields = _plain(message)
    return cast(bytes, msgpack.packb({"v": PROTOCOL_VERSION, "k": type(message).__name__, **fields}))


def decode(data: bytes | memoryview) -> AnyMessage:
    """The message in `data`. Raises BadMessage, naming the kind and the field, when it is not one."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        body = msgpack.unpackb(
            data,
            max_str_len=MAX_MESSAGE_BYTES,
            max_array_len=_MAX_ITEMS,
            max_map_len=1024,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises many kinds; all mean the same here
        raise BadMessage(f"not msgpack: {error!r}") from error
    if not isinstance(body, dict):
        raise BadMessage(f"a message must be a map, not {type(body).__name__}")
    if body.get("v") != PROTOCOL_VERSION:
        raise BadMessage(f"protocol version {body.get('v')!r}, expected {PROTOCOL_VERSION}")
    kind = body.get("k")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadMessage(f"unknown message kind {str(kind)[:80]!r}")
    return cast(AnyMessage, _reader(_KINDS[kind])(body, kind))


def _plain(value: object) -> Any:
    """`value` as maps, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        # Long tuples here are token ids or page numbers; asking once spares a call per item.
        return value if all(type(item) is int for item in value) else [_plain(item) for item in value]
    return value


@cache
def _reader(kind: Any) -> Reader:
    """A function that checks a decoded value against the type `kind` and builds it."""
    kind = getattr(kind, "__supertype__", kind)  # a NewType reads as what it wraps
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(cast(type, kind))
    origin = get_origin(kind)
    if origin is tuple:
        return _tuple_reader(get_args(kind))
    if origin in (Union, types.UnionType):
        return _optional_reader(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_reader(kind)
    if kind in (int, float, str, bool):
        return _scalar_reader(kind)
    raise TypeError(f"messages cannot carry a {kind!r}")


def _dataclass_reader(kind: type) -> Reader:
    hints = get_type_hints(kind)
    readers = [(field.name, _reader(hints[field.name])) for field in dataclasses.fields(kind)]

    def read(value: object, where: str) -> Any:
        if not isinstance(value, dict):
            raise BadMessage(f"{where} must be a map")
        missing = [name for name, _ in readers if name not in value]
        if missing:
            raise BadMessage(f"{where} lacks {', '.join(missing)}")
        try:
            return kind(**{name: read(value[name], f"{where}.{name}") for name, read in readers})
        except ValueError as error:
            raise BadMessage(f"{where}: {error}") from error

    return read


def _tuple_reader(args: tuple[Any, ...]) -> Reader:
    if args == (int, Ellipsis):

        def read_ints(value: object, where: str) -> tuple[int, ...]:
            if not isinstance(value, list) or any(type(item) is not int for item in value):
                raise BadMessage(f"{where} must be a list of integers")
            return tuple(value)

        return read_ints
    many = len(args) == 2 and args[1] is Ellipsis
    readers = [_reader(arg) for arg in args if arg is not Ellipsis]

    def read(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise BadMessage(f"{where} must be a list")
        if many:
            return tuple(readers[0](item, where) for item in value)
        if len(value) != len(readers):
            raise BadMessage(f"{where} must have {len(readers)} items, not {len(value)}")
        return tuple(reader(item, where) for reader, item in zip(readers, value, strict=True))

    return read


def _optional_reader(args: tuple[Any, ...]) -> Reader:
    (inner,) = (_reader(arg) for arg in args if arg is not type(None))
    return lambda value, where: None if value is None else inner(value, where)


def _enum_reader(kind: type[Enum]) -> Reader:
    def read(value: object, where: str) -> Enum:
        try:
            return kind(value)
        except ValueError:
            names = ", ".join(str(member.value) for member in kind)
            raise BadMessage(f"{where} is {str(value)[:80]!r}, not one of {names}") from None

    return read


def _scalar_reader(kind: type) -> Reader:
    def read(value: object, where: str) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise BadMessage(f"{where} must be {kind.__name__}, not {type(value).__name__}")
        return value

    return read
