from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pools.errors import AuditFailed, DoubleRelease, ForeignRelease, UseAfterRelease
from pools.ledger import Ledger, State, Usage


@pytest.fixture
def ledger() -> Ledger:
    return Ledger("page", 8)


def test_fresh_ledger_hands_out_consecutive_numbers(ledger: Ledger) -> None:
    assert ledger.take(3, "a") == (0, 1, 2)
    assert ledger.take(2, "b") == (3, 4)


def test_numbers_come_back_in_ascending_order(ledger: Ledger) -> None:
    taken = ledger.take(5, "a")
    assert taken is not None
    ledger.release(taken, "a")
    assert ledger.take(5, "b") == taken


def test_take_is_all_or_nothing(ledger: Ledger) -> None:
    ledger.take(6, "a")
    assert ledger.take(3, "b") is None
    assert ledger.usage == Usage(free=2, held=6, fenced=0)
    assert ledger.take(2, "b") == (6, 7)


def test_taking_none_from_an_empty_ledger_succeeds() -> None:
    assert Ledger("slot", 0).take(0, "a") == ()


@pytest.mark.parametrize("number", [-1, -8])
def test_negative_take_is_refused(ledger: Ledger, number: int) -> None:
    with pytest.raises(ValueError, match=f"cannot take {number} pages"):
        ledger.take(number, "a")


def test_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Ledger("row", -1)


def test_fenced_numbers_are_neither_free_nor_held(ledger: Ledger) -> None:
    ledger.take(8, "a")
    ledger.fence((2, 3), "a")
    assert ledger.usage == Usage(free=0, held=6, fenced=2)
    assert ledger.take(1, "b") is None
    assert (ledger.state(2), ledger.holder(2)) == (State.FENCED, "a")
    ledger.unfence((2, 3), "a")
    assert ledger.take(2, "b") == (2, 3)
    assert ledger.holder(2) == "b"


Step = Callable[[Ledger], None]


def _held(ledger: Ledger) -> None:
    ledger.take(4, "a")


def _fenced(ledger: Ledger) -> None:
    ledger.take(4, "a")
    ledger.fence((0, 1, 2, 3), "a")


def _given_back(ledger: Ledger) -> None:
    ledger.take(4, "a")
    ledger.release((0, 1, 2, 3), "a")


@pytest.mark.parametrize(
    ("before", "act", "indexes", "holder", "error"),
    [
        (_given_back, Ledger.release, (0,), "a", DoubleRelease),
        (_given_back, Ledger.fence, (0,), "a", DoubleRelease),
        (_given_back, Ledger.unfence, (0,), "a", DoubleRelease),
        (_held, Ledger.release, (0, 1, 0), "a", DoubleRelease),
        (_held, Ledger.release, (0, 5), "a", DoubleRelease),
        (_held, Ledger.release, (0,), "b", ForeignRelease),
        (_held, Ledger.fence, (0,), "b", ForeignRelease),
        (_held, Ledger.unfence, (0,), "a", ForeignRelease),
        (_held, Ledger.release, (0, 8), "a", ForeignRelease),
        (_held, Ledger.release, (-1,), "a", ForeignRelease),
        (_fenced, Ledger.release, (0,), "a", ForeignRelease),
        (_fenced, Ledger.fence, (0,), "a", ForeignRelease),
        (_fenced, Ledger.unfence, (0,), "b", ForeignRelease),
        (_given_back, Ledger.check, (0,), "a", UseAfterRelease),
        (_fenced, Ledger.check, (0,), "a", UseAfterRelease),
        (_held, Ledger.check, (0,), "b", UseAfterRelease),
    ],
)
def test_misuse_raises_at_once_and_changes_nothing(
    ledger: Ledger,
    before: Step,
    act: Callable[[Ledger, Sequence[int], str], None],
    indexes: tuple[int, ...],
    holder: str,
    error: type[Exception],
) -> None:
    before(ledger)
    states = [(ledger.state(index), ledger.holder(index)) for index in range(8)]
    usage = ledger.usage
    with pytest.raises(error, match="page"):
        act(ledger, indexes, holder)
    assert ledger.usage == usage
    assert [(ledger.state(index), ledger.holder(index)) for index in range(8)] == states
    ledger.audit()


def test_check_accepts_what_is_held(ledger: Ledger) -> None:
    _held(ledger)
    ledger.check((0, 3), "a")


def _lose_a_free_number(ledger: Ledger) -> None:
    ledger._free.pop()


def _list_one_twice(ledger: Ledger) -> None:
    ledger._free[0] = ledger._free[1]


def _list_a_held_number(ledger: Ledger) -> None:
    ledger._free[0] = 0


def _miscount_fences(ledger: Ledger) -> None:
    ledger._fenced += 1


@pytest.mark.parametrize("damage", [_lose_a_free_number, _list_one_twice, _list_a_held_number, _miscount_fences])
def test_audit_finds_damaged_books(ledger: Ledger, damage: Step) -> None:
    _held(ledger)
    ledger.audit()
    damage(ledger)
    with pytest.raises(AuditFailed, match="pages"):
        ledger.audit()
