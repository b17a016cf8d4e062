from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pools.errors import (
    AuditFailed,
    DoubleRelease,
    ForeignRelease,
    RequestTooLong,
    SecondLease,
    UseAfterRelease,
)
from pools.lease import Lease, Shortage
from pools.ledger import Usage
from pools.pools import Pools


def make_pools(**sizes: int) -> Pools:
    usual = {
        "num_rows": 3,
        "num_pages": 8,
        "num_slots": 6,
        "page_size": 4,
        "max_pages_per_request": 6,
        "slots_per_request": 2,
    }
    return Pools(**(usual | sizes))


@pytest.fixture
def pools() -> Pools:
    return make_pools()


def reserve(pools: Pools, holder: str, tokens: int) -> Lease:
    lease = pools.reserve(holder, tokens)
    assert isinstance(lease, Lease)
    return lease


def test_lease_has_a_row_pages_in_token_order_and_slots(pools: Pools) -> None:
    assert reserve(pools, "a", 9) == Lease("a", row=0, pages=(0, 1, 2), slots=(0, 1))
    assert reserve(pools, "b", 8) == Lease("b", row=1, pages=(3, 4), slots=(2, 3))


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (4, 1), (5, 2), (24, 6)])
def test_pages_are_whole(pools: Pools, tokens: int, pages: int) -> None:
    assert pools.pages_for(tokens) == pages


def test_model_without_paged_layers_needs_no_pages() -> None:
    pools = make_pools(num_pages=0, max_pages_per_request=0)
    assert reserve(pools, "a", 10**6) == Lease("a", 0, (), (0, 1))


def test_model_without_slots_needs_none() -> None:
    pools = make_pools(num_slots=0, slots_per_request=0)
    assert reserve(pools, "a", 1) == Lease("a", 0, (0,), ())


@pytest.mark.parametrize(
    ("sizes", "shortage", "text"),
    [
        ({"num_rows": 0}, Shortage(rows=1, pages=0, slots=0), "lacks 1 row"),
        ({"num_slots": 1}, Shortage(rows=0, pages=0, slots=1), "lacks 1 slot"),
        ({"num_slots": 0, "num_rows": 0}, Shortage(rows=1, pages=0, slots=2), "lacks 1 row, 2 slots"),
    ],
)
def test_shortage_says_which_pool_lacks_how_much(sizes: dict[str, int], shortage: Shortage, text: str) -> None:
    pools = make_pools(**sizes)
    before = pools.stats()
    assert pools.reserve("a", 5) == shortage
    assert str(shortage) == text
    assert pools.stats() == before


def test_reserve_takes_nothing_when_one_pool_lacks(pools: Pools) -> None:
    reserve(pools, "a", 24)
    before = pools.stats()
    assert pools.reserve("b", 12) == Shortage(rows=0, pages=1, slots=0)
    assert pools.stats() == before
    reserve(pools, "b", 8)


def test_request_that_never_fits_is_refused_not_made_to_wait() -> None:
    with pytest.raises(
        RequestTooLong, match=r"25 tokens need 7 pages of 4, and one request can have 6 \(24 tokens\)"
    ):
        make_pools().reserve("a", 25)
    with pytest.raises(RequestTooLong, match="can have 2"):
        make_pools(num_pages=2).reserve("a", 12)


@pytest.mark.parametrize("tokens", [0, -1])
def test_request_without_tokens_is_refused(pools: Pools, tokens: int) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        pools.reserve("a", tokens)


def test_a_holder_has_one_lease(pools: Pools) -> None:
    lease = reserve(pools, "a", 1)
    with pytest.raises(SecondLease, match="'a' has a lease"):
        pools.reserve("a", 1)
    pools.fence(lease)
    with pytest.raises(SecondLease, match="'a' has a fenced lease"):
        pools.reserve("a", 1)


def test_released_memory_is_free_again(pools: Pools) -> None:
    fresh = pools.stats()
    lease = reserve(pools, "a", 24)
    assert pools.release(lease) is lease
    assert pools.stats() == fresh


def test_fenced_memory_stays_out_until_unfenced(pools: Pools) -> None:
    lease = reserve(pools, "a", 24)
    pools.fence(lease)
    assert pools.stats().rows == Usage(free=2, held=0, fenced=1)
    assert pools.stats().pages == Usage(free=2, held=0, fenced=6)
    assert pools.stats().slots == Usage(free=4, held=0, fenced=2)
    assert pools.reserve("b", 24) == Shortage(rows=0, pages=4, slots=0)
    assert pools.unfence("a") is lease
    reserve(pools, "b", 24)


def test_release_twice(pools: Pools) -> None:
    lease = reserve(pools, "a", 1)
    pools.release(lease)
    for give_back in (pools.release, pools.fence):
        with pytest.raises(DoubleRelease, match="'a'"):
            give_back(lease)
    with pytest.raises(UseAfterRelease, match="'a'"):
        pools.check(lease)


def test_release_of_an_old_lease_that_equals_the_new_one(pools: Pools) -> None:
    old = reserve(pools, "a", 1)
    pools.release(old)
    new = reserve(pools, "a", 1)
    assert old == new
    with pytest.raises(ForeignRelease):
        pools.release(old)
    with pytest.raises(UseAfterRelease):
        pools.check(old)
    pools.check(new)
    pools.release(new)


def test_release_of_another_holders_memory(pools: Pools) -> None:
    lease = reserve(pools, "a", 1)
    with pytest.raises(ForeignRelease, match="row 0 is 'a'"):
        pools.release(replace(lease, holder="b"))
    pools.audit()
    assert pools.stats().rows.held == 1


def test_release_of_a_fenced_lease(pools: Pools) -> None:
    lease = reserve(pools, "a", 1)
    pools.fence(lease)
    for give_back in (pools.release, pools.fence):
        with pytest.raises(ForeignRelease):
            give_back(lease)
    with pytest.raises(UseAfterRelease):
        pools.check(lease)
    assert pools.stats().rows.fenced == 1


def test_unfence_of_what_is_not_fenced(pools: Pools) -> None:
    with pytest.raises(DoubleRelease, match="'a' has no fenced lease"):
        pools.unfence("a")
    lease = reserve(pools, "a", 1)
    with pytest.raises(ForeignRelease, match="is held, not fenced"):
        pools.unfence("a")
    pools.fence(lease)
    pools.unfence("a")
    with pytest.raises(DoubleRelease):
        pools.unfence("a")


def _forget_a_lease(pools: Pools) -> None:
    del pools._held["a"]


def _move_a_lease(pools: Pools) -> None:
    pools._fenced["a"] = pools._held.pop("a")


def _share_a_page(pools: Pools) -> None:
    pools._held["b"] = replace(pools._held["b"], pages=pools._held["a"].pages)


def _name_a_page_twice(pools: Pools) -> None:
    pages = pools._held["a"].pages
    pools._held["a"] = replace(pools._held["a"], pages=(pages[0], pages[0]))


def _drop_a_slot(pools: Pools) -> None:
    pools._held["a"] = replace(pools._held["a"], slots=())


def _release_behind_the_lease(pools: Pools) -> None:
    pools._pages.release(pools._held["a"].pages, "a")


@pytest.mark.parametrize(
    "damage",
    [_forget_a_lease, _move_a_lease, _share_a_page, _name_a_page_twice, _drop_a_slot, _release_behind_the_lease],
)
def test_audit_finds_leases_that_disagree_with_the_ledgers(pools: Pools, damage: Callable[[Pools], None]) -> None:
    reserve(pools, "a", 8)
    reserve(pools, "b", 8)
    pools.audit()
    damage(pools)
    with pytest.raises(AuditFailed):
        pools.audit()
