"""Random lives of leases, against a model made of sets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from pools.errors import DoubleRelease, ForeignRelease, RequestTooLong, SecondLease, UseAfterRelease
from pools.lease import Lease, Shortage
from pools.ledger import Usage
from pools.pools import Pools

PAGE_SIZE = 4
HOLDERS = st.sampled_from("abcde")


class LeaseMachine(RuleBasedStateMachine):
    """The model: for each pool the set of free numbers, and which leases are held or fenced."""

    leases: Bundle[Lease] = Bundle("leases")

    @initialize(
        num_rows=st.integers(0, 4),
        num_pages=st.integers(0, 12),
        num_slots=st.integers(0, 8),
        max_pages=st.integers(0, 6),
        slots_per_request=st.integers(0, 3),
    )
    def start(
        self, num_rows: int, num_pages: int, num_slots: int, max_pages: int, slots_per_request: int
    ) -> None:  # fmt: skip
        self.counts = (num_rows, num_pages, num_slots)
        self.free = tuple(set(range(count)) for count in self.counts)
        self.most_pages = min(max_pages, num_pages) if max_pages else None
        self.slots_per_request = slots_per_request
        self.held: list[Lease] = []
        self.fenced: list[Lease] = []
        self.pools = Pools(
            num_rows=num_rows,
            num_pages=num_pages,
            num_slots=num_slots,
            page_size=PAGE_SIZE,
            max_pages_per_request=max_pages,
            slots_per_request=slots_per_request,
        )

    @rule(target=leases, holder=HOLDERS, tokens=st.integers(1, 30))
    def reserve(self, holder: str, tokens: int) -> Any:
        if any(lease.holder == holder for lease in self.held + self.fenced):
            with pytest.raises(SecondLease):
                self.pools.reserve(holder, tokens)
            return multiple()
        pages = 0
        if self.most_pages is not None:
            pages = len(range(0, tokens, PAGE_SIZE))
            if pages > self.most_pages:
                with pytest.raises(RequestTooLong):
                    self.pools.reserve(holder, tokens)
                return multiple()
        needs = (1, pages, self.slots_per_request)
        result = self.pools.reserve(holder, tokens)
        lacking = [max(0, need - len(free)) for need, free in zip(needs, self.free, strict=True)]
        if any(lacking):
            assert result == Shortage(*lacking)
            return multiple()
        assert isinstance(result, Lease)
        assert result.holder == holder
        for need, free, numbers in zip(needs, self.free, self.numbers(result), strict=True):
            assert len(numbers) == need
            assert set(numbers) <= free
            free -= set(numbers)
        self.held.append(result)
        return result

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        if self.refused(lease, self.pools.release):
            return
        assert self.pools.release(lease) is lease
        self.held = [other for other in self.held if other is not lease]
        self.give_back(lease)

    @rule(lease=leases)
    def fence(self, lease: Lease) -> None:
        if self.refused(lease, self.pools.fence):
            return
        self.pools.fence(lease)
        self.held = [other for other in self.held if other is not lease]
        self.fenced.append(lease)

    @rule(holder=HOLDERS)
    def unfence(self, holder: str) -> None:
        fenced = [lease for lease in self.fenced if lease.holder == holder]
        if not fenced:
            error = ForeignRelease if any(lease.holder == holder for lease in self.held) else DoubleRelease
            with pytest.raises(error):
                self.pools.unfence(holder)
            return
        assert self.pools.unfence(holder) is fenced[0]
        self.fenced.remove(fenced[0])
        self.give_back(fenced[0])

    @rule(lease=leases)
    def use(self, lease: Lease) -> None:
        if any(other is lease for other in self.held):
            self.pools.check(lease)
        else:
            with pytest.raises(UseAfterRelease):
                self.pools.check(lease)

    @invariant()
    def books_add_up(self) -> None:
        self.pools.audit()
        stats = self.pools.stats()
        for pool, usage in enumerate((stats.rows, stats.pages, stats.slots)):
            held = sum(len(self.numbers(lease)[pool]) for lease in self.held)
            fenced = sum(len(self.numbers(lease)[pool]) for lease in self.fenced)
            assert usage == Usage(free=len(self.free[pool]), held=held, fenced=fenced)
            assert usage.free + usage.held + usage.fenced == self.counts[pool]

    def refused(self, lease: Lease, give_up: Any) -> bool:
        """Whether the lease is no longer held, in which case giving it up must say so."""
        if any(other is lease for other in self.held):
            return False
        with pytest.raises(DoubleRelease if lease.row in self.free[0] else ForeignRelease):
            give_up(lease)
        return True

    def give_back(self, lease: Lease) -> None:
        for free, numbers in zip(self.free, self.numbers(lease), strict=True):
            assert free.isdisjoint(numbers)
            free |= set(numbers)

    @staticmethod
    def numbers(lease: Lease) -> tuple[tuple[int, ...], ...]:
        return (lease.row,), lease.pages, lease.slots


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(stateful_step_count=40)
