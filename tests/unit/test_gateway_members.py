from __future__ import annotations

from dataclasses import replace

from gateway.members import Members
from wire.capacity import Capacity
from wire.messages import Bye, Hello, Incarnation, Load, Role

CAPACITY = Capacity(
    max_running_requests=8, max_request_tokens=100, num_rows=8, num_pages=64, num_slots=8, page_size=16
)
HELLO = Hello(1, "p0", Incarnation("i1"), Role.PREFILL, "m", "f", "s", "", CAPACITY)


def load(incarnation: str = "i1", worker: str = "p0", running: int = 0) -> Load:
    return Load(worker, Incarnation(incarnation), 0, running, 0, 0, 0, 0, 0, 0, 0, 0.0)


def names(members: Members) -> list[str]:
    return [member.name for member in members]


def test_hello_takes_in_and_bye_lets_go() -> None:
    members = Members(3.0)
    assert members.on_hello(HELLO, b"a", 0.0) is None
    assert names(members) == ["p0"]
    gone = members.on_bye(Bye("p0", Incarnation("i1")))
    assert gone is not None
    assert gone.name == "p0"
    assert names(members) == []


def test_silence_for_too_long_ends_membership() -> None:
    members = Members(3.0)
    members.on_hello(HELLO, b"a", 0.0)
    members.on_load(load(), b"a", 10.0)
    assert members.expire(13.0) == []
    assert [member.name for member in members.expire(13.1)] == ["p0"]
    assert names(members) == []


def test_load_of_a_stranger_is_refused() -> None:
    members = Members(3.0)
    assert not members.on_load(load(), b"a", 0.0)
    members.on_hello(HELLO, b"a", 0.0)
    assert members.on_load(load(running=3), b"a", 1.0)
    assert not members.on_load(load("another"), b"a", 1.0)
    (member,) = members
    assert member.load is not None
    assert member.load.running == 3


def test_new_incarnation_replaces_and_returns_the_former() -> None:
    members = Members(3.0)
    members.on_hello(HELLO, b"a", 0.0)
    former = members.on_hello(replace(HELLO, incarnation=Incarnation("i2")), b"b", 1.0)
    assert former is not None
    assert (former.incarnation, former.peer) == ("i1", b"a")
    assert [(member.incarnation, member.peer) for member in members] == [("i2", b"b")]
    assert members.on_bye(Bye("p0", Incarnation("i1"))) is None, "the former process's goodbye comes too late"
    assert names(members) == ["p0"]


def test_the_same_incarnation_may_dial_again() -> None:
    members = Members(3.0)
    members.on_hello(HELLO, b"a", 0.0)
    assert members.on_hello(HELLO, b"b", 1.0) is None
    assert [member.peer for member in members] == [b"b"]
