"""The codec: every message survives the wire, and nothing else gets through."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.codec import decode, encode
from wire.errors import BadMessage
from wire.messages import PROTOCOL_VERSION, Message
from wire.rank_messages import RankMessage

KINDS = (*get_args(Message), *get_args(RankMessage))
# `StateSpec` checks its own fields, so random ones rarely pass; messages with one are built below.
SIMPLE = [kind for kind in KINDS if kind.__name__ != "PeerHello"]

messages = st.one_of([st.from_type(kind) for kind in SIMPLE])


def _without_nan(message: Message) -> bool:
    return message == message and "nan" not in repr(message)


@given(messages.filter(_without_nan))
def test_a_message_survives_the_wire(message: Message) -> None:
    try:
        data = encode(message)
    except OverflowError:  # integers beyond 64 bits do not exist on this wire
        return
    assert decode(data) == message


def test_every_kind_was_tried_or_is_built_elsewhere() -> None:
    assert {kind.__name__ for kind in KINDS} - {kind.__name__ for kind in SIMPLE} == {"PeerHello"}


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_else_is_raised(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(data)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(st.sampled_from([kind.__name__ for kind in KINDS]), st.data())
def test_wrong_fields_are_refused(kind: str, data: st.DataObject) -> None:
    cls = next(item for item in KINDS if item.__name__ == kind)
    fields = {field.name: data.draw(plain) for field in dataclasses.fields(cls)}
    body = msgpack.packb({"v": PROTOCOL_VERSION, "k": kind, **fields})
    try:
        message = decode(body)
    except BadMessage:
        return
    assert decode(encode(message)) == message or not _without_nan(message)


@given(messages.filter(_without_nan), st.data())
def test_a_flipped_byte_never_raises_anything_else(message: Message, data: st.DataObject) -> None:
    try:
        raw = bytearray(encode(message))
    except OverflowError:
        return
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(BadMessage):
        decode(bytes(raw))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"v": 99, "k": "Cancel", "attempt": "a"}, "protocol version 99"),
        ({"v": PROTOCOL_VERSION, "k": "Nonsense"}, "unknown message kind 'Nonsense'"),
        ({"v": PROTOCOL_VERSION, "k": "Cancel"}, "Cancel lacks attempt"),
        ({"v": PROTOCOL_VERSION, "k": "Cancel", "attempt": 3}, "Cancel.attempt must be str, not int"),
        (
            {
                "v": PROTOCOL_VERSION,
                "k": "Reserved",
                "attempt": "a",
                "pages": [1, "x"],
                "slots": [],
                "held_tokens": 0,
            },
            "Reserved.pages",
        ),
        ([1, 2], "must be a map"),
    ],
)
def test_what_is_wrong_is_named(body: object, says: str) -> None:
    with pytest.raises(BadMessage, match=says.replace("(", r"\(")):
        decode(msgpack.packb(body))


def test_unknown_fields_are_ignored() -> None:
    body = msgpack.packb({"v": PROTOCOL_VERSION, "k": "Cancel", "attempt": "a", "later": [1, {"x": 2}]})
    assert decode(body).attempt == "a"  # type: ignore[union-attr]


def test_depth_and_length_are_bounded() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(BadMessage):
        decode(deep)
    huge_claim = b"\xdd\xff\xff\xff\xff"
    with pytest.raises(BadMessage):
        decode(huge_claim)
