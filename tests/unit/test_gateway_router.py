from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.members import Member
from gateway.router import choose, pairs, why_unready
from wire.capacity import Capacity
from wire.messages import Hello, Incarnation, Load, Role

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


def member(
    name: str,
    role: Role,
    *,
    holds: int = 100,
    runs: int = 8,
    fingerprint: str = "f",
    digest: str = "s",
    busy: int = 0,
) -> Member:
    capacity = Capacity(
        max_running_requests=runs, max_request_tokens=holds, num_rows=runs, num_pages=64, num_slots=runs, page_size=16
    )
    incarnation = Incarnation(name + "-1")
    hello = Hello(1, name, incarnation, role, "m", fingerprint, digest, "", capacity)
    return Member(hello, name.encode(), 0.0, Load(name, incarnation, 0, busy, 0, 0, 0, 0, 0, 0, 0, 0.0))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([], "no prefill and no decode"),
        ([member("p", P)], "no decode worker"),
        ([member("d", D)], "no prefill worker"),
        ([member("p", P), member("d", D, fingerprint="other")], "fingerprint"),
        ([member("p", P), member("d", D, digest="other")], "spec_digest"),
    ],
)
def test_says_what_is_missing(members: list[Member], reason: str) -> None:
    assert pairs(members) == []
    assert reason in (why_unready(members) or "")


def test_only_matching_workers_are_paired() -> None:
    members = [member("p", P), member("d1", D, fingerprint="other"), member("d2", D), member("d3", D, digest="t")]
    assert [[worker.name for worker in pair.workers] for pair in pairs(members)] == [["p", "d2"]]
    assert why_unready(members) is None


def test_colocated_worker_is_routed_alone() -> None:
    (pair,) = pairs([member("c", C), member("p", P)])
    assert (pair.prefill.name, pair.decode) == ("c", None)
    assert choose([pair], 40, 100, {}) == pair
    assert choose([pair], 40, 101, {}) is None


def test_both_sides_must_hold_their_part() -> None:
    ready = pairs([member("p", P, holds=10), member("d", D, holds=20)])
    assert choose(ready, 10, 20, {}) is not None
    assert choose(ready, 11, 20, {}) is None, "prefill cannot hold the prompt"
    assert choose(ready, 10, 21, {}) is None, "decode cannot hold prompt and answer"


def test_least_loaded_pair_wins() -> None:
    ready = pairs([member("p1", P, busy=4), member("p2", P), member("d1", D), member("d2", D, busy=7)])
    assert [worker.name for worker in choose(ready, 1, 2, {}).workers] == ["p2", "d1"]  # type: ignore[union-attr]
    given_out = {"p2": 5, "d1": 8}
    assert [worker.name for worker in choose(ready, 1, 2, given_out).workers] == ["p1", "d2"]  # type: ignore[union-attr]


def test_load_is_relative_to_what_a_worker_can_run() -> None:
    ready = pairs([member("c1", C, runs=2, busy=2), member("c2", C, runs=64, busy=20)])
    assert choose(ready, 1, 2, {}).prefill.name == "c2"  # type: ignore[union-attr]


@given(
    st.lists(
        st.tuples(st.sampled_from(Role), st.integers(1, 30), st.sampled_from("fg"), st.integers(0, 9)), max_size=8
    ),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_whatever_is_chosen_can_serve(workers: list[tuple[Role, int, str, int]], prompt: int, answer: int) -> None:
    members = [
        member(f"w{at}", role, holds=holds, fingerprint=fingerprint, busy=busy)
        for at, (role, holds, fingerprint, busy) in enumerate(workers)
    ]
    total = prompt + answer

    def serves(first: Member, second: Member | None) -> bool:
        if second is None:
            return first.hello.role is C and first.hello.capacity.max_request_tokens >= total
        return (
            (first.hello.role, second.hello.role) == (P, D)
            and first.hello.fingerprint == second.hello.fingerprint
            and first.hello.capacity.max_request_tokens >= prompt
            and second.hello.capacity.max_request_tokens >= total
        )

    pair = choose(pairs(members), prompt, total, {})
    possible = any(serves(first, second) for first in members for second in [*members, None])
    assert (pair is not None) == possible
    if pair is not None:
        assert serves(pair.prefill, pair.decode)
