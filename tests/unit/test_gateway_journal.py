from __future__ import annotations

import pytest

from gateway.errors import QueueFull
from gateway.journal import Journal, Record
from gateway.members import Member
from gateway.router import Pair
from wire.capacity import Capacity
from wire.messages import AttemptId, Finish, Hello, Incarnation, Role, Sampling, Token

CAPACITY = Capacity(
    max_running_requests=8, max_request_tokens=99, num_rows=8, num_pages=64, num_slots=8, page_size=16
)


def member(name: str, role: Role, incarnation: str = "1") -> Member:
    return Member(Hello(1, name, Incarnation(incarnation), role, "m", "f", "s", "", CAPACITY), name.encode(), 0.0)


PAIR = Pair(member("p", Role.PREFILL), member("d", Role.DECODE))
ALONE = Pair(member("c", Role.COLOCATED), None)


def record(response_id: str = "r", index: int = 0) -> Record:
    return Record(response_id, index, (1, 2), Sampling(0.0, 1.0, 0, 0, 8, (), None), 1e9)


def token(index: int, finish: Finish | None = None) -> Token:
    return Token(AttemptId("r-0/1"), index, 50 + index, None, (), finish)


def counts(journal: Journal) -> dict[str, int]:
    return {name: count for name, count in journal.open_requests.items() if count}


def test_prefill_is_free_after_the_first_token_and_decode_at_the_end() -> None:
    journal, entry = Journal(4), record()
    journal.open(entry)
    journal.assign(entry, PAIR)
    assert entry.attempt == "r-0/1"
    assert counts(journal) == {"p": 1, "d": 1}
    journal.write(entry, [token(0)])
    assert counts(journal) == {"d": 1}
    journal.write(entry, [token(1), token(2, Finish.STOP)])
    assert (entry.tokens, entry.finished_at) == ([50, 51, 52], 2)
    assert journal.close(entry)
    assert counts(journal) == {}
    assert not journal.close(entry)
    assert counts(journal) == {}


def test_colocated_worker_is_busy_to_the_end() -> None:
    journal, entry = Journal(4), record()
    journal.open(entry)
    journal.assign(entry, ALONE)
    journal.write(entry, [token(0)])
    assert counts(journal) == {"c": 1}
    journal.close(entry)
    assert counts(journal) == {}


def test_next_attempt_moves_the_count() -> None:
    journal, entry = Journal(4), record()
    journal.open(entry)
    journal.assign(entry, PAIR)
    journal.write(entry, [token(0)])
    journal.assign(entry, ALONE)
    assert entry.attempt == "r-0/2"
    assert counts(journal) == {"c": 1}


def test_the_limit_holds() -> None:
    journal = Journal(2)
    first = record(index=0)
    journal.open(first)
    journal.open(record(index=1))
    with pytest.raises(QueueFull, match="2 requests"):
        journal.open(record(index=2))
    journal.close(first)
    journal.open(record(index=2))


def test_finds_what_a_lost_worker_held() -> None:
    journal = Journal(4)
    entries = [record(index=index) for index in range(3)]
    for entry, pair in zip(entries, (PAIR, ALONE, PAIR), strict=True):
        journal.open(entry)
        journal.assign(entry, pair)
    assert journal.held_by(member("d", Role.DECODE)) == [entries[0], entries[2]]
    assert journal.held_by(member("d", Role.DECODE, "2")) == [], "a new process holds nothing of the old one"
    assert journal.held_by(member("c", Role.COLOCATED)) == [entries[1]]


def test_a_lost_prefill_worker_takes_along_only_what_is_not_handed_over_yet() -> None:
    journal, entry = Journal(2), record()
    prefill, decode = PAIR.workers
    journal.open(entry)
    journal.assign(entry, PAIR)
    assert journal.held_by(prefill) == journal.held_by(decode) == [entry]
    journal.write(entry, [token(0)])
    assert journal.held_by(prefill) == [entry]  # the state may still be on its way
    journal.write(entry, [token(1)])
    assert journal.held_by(prefill) == []
    assert journal.held_by(decode) == [entry]
    assert journal.held_by(member("d", Role.DECODE, "2")) == []
