"""Shared prefixes: a page is only ever read as what was written in it, by leases that begin with the same tokens."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from pools.lease import Lease, Shortage
from pools.pools import Pools
from pools.prefix import chain_of

PAGE = 2
PAGES = 9
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=10)


@given(token_lists, token_lists)
def test_keys_are_equal_exactly_where_all_tokens_so_far_are(one: list[int], other: list[int]) -> None:
    for index, (a, b) in enumerate(zip(chain_of(one, PAGE), chain_of(other, PAGE), strict=False)):
        end = (index + 1) * PAGE
        assert (a == b) == (one[:end] == other[:end])
    assert len(chain_of(one, PAGE)) == len(one) // PAGE


class PrefixMachine(RuleBasedStateMachine):
    """The model: what every page holds, written by whoever owns it and by nobody else."""

    leases: Bundle[tuple[Lease, tuple[int, ...]]] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pools = Pools(
            num_rows=4, num_pages=PAGES, num_slots=0, page_size=PAGE, max_pages_per_request=6, slots_per_request=0
        )
        self.content: dict[int, tuple[int, ...]] = {}
        self.open: list[tuple[Lease, tuple[int, ...]]] = []
        self.names = 0

    @rule(target=leases, tokens=token_lists)
    def reserve(self, tokens: list[int]) -> Any:
        self.names += 1
        chain = chain_of(tokens, PAGE)
        lease = self.pools.reserve(str(self.names), len(tokens) + 1, chain)
        if isinstance(lease, Shortage):
            # Pages that nobody reads never keep a request waiting.
            read = {page for item, _ in self.open for page in item.shared}
            owned = {page for item, _ in self.open for page in item.pages}
            unused = PAGES - len(read | owned)
            assert len(self.open) == 4 or unused < self.pools.pages_for(len(tokens) + 1)
            return multiple()
        assert len(lease.token_pages) == self.pools.pages_for(len(tokens) + 1)
        others = {page for item, _ in self.open for page in item.token_pages}
        assert not others & set(lease.pages)
        for index, page in enumerate(lease.shared):
            assert self.content[page] == tuple(tokens[: (index + 1) * PAGE])
        for index, page in enumerate(lease.pages, start=len(lease.shared)):
            self.content[page] = tuple(tokens[: (index + 1) * PAGE])
        self.open.append((lease, tuple(tokens)))
        return lease, tuple(tokens)

    @rule(item=leases, publish=st.booleans())
    def release(self, item: tuple[Lease, tuple[int, ...]], publish: bool) -> None:
        if item not in self.open:
            return
        self.open.remove(item)
        lease, tokens = item
        freed = self.pools.release(lease, chain_of(tokens, PAGE) if publish else ())
        assert set(freed.pages) <= set(lease.pages)
        if not publish:
            assert freed.pages == lease.pages

    @rule(item=leases)
    def fence_and_unfence(self, item: tuple[Lease, tuple[int, ...]]) -> None:
        if item not in self.open:
            return
        self.open.remove(item)
        self.pools.fence(item[0])
        self.pools.audit()
        assert self.pools.unfence(item[0].holder) == item[0]

    @invariant()
    def books_add_up(self) -> None:
        self.pools.audit()
        stats = self.pools.stats()
        read_or_owned = {page for item, _ in self.open for page in item.token_pages}
        assert stats.pages.free + stats.kept == PAGES - len(read_or_owned)
        # What is shared is not written by anyone while it is.
        for lease, tokens in self.open:
            for index, page in enumerate(lease.shared):
                assert self.content[page] == tokens[: (index + 1) * PAGE]


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(stateful_step_count=40)


def test_the_longest_unused_goes_first_and_prefixes_outlive_what_follows_them() -> None:
    pools = Pools(num_rows=4, num_pages=6, num_slots=0, page_size=1, max_pages_per_request=6, slots_per_request=0)

    def serve(name: str, tokens: list[int]) -> int:
        chain = chain_of(tokens, 1)
        lease = pools.reserve(name, len(tokens), chain)
        assert isinstance(lease, Lease)
        pools.release(lease, chain)
        return len(lease.shared)

    assert serve("a", [1, 2, 3]) == 0
    assert serve("b", [7, 8, 9]) == 0
    assert serve("a again", [1, 2, 3]) == 3
    assert serve("c", [5]) == 0  # takes the end of b's
    assert serve("b again", [7, 8]) == 2
    assert serve("a once more", [1, 2, 3]) == 3
