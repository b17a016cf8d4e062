"""The request pool (rows), the page pool and the slot pool of one worker, and every lease on them.

reserve ──▶ held lease ──release──▶ free, or kept: pages whose content may serve again
              │
              └──fence──▶ fenced lease ──unfence──▶ free
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pools.errors import (
    AuditFailed,
    DoubleRelease,
    ForeignRelease,
    LedgerError,
    RequestTooLong,
    SecondLease,
    UseAfterRelease,
)
from pools.lease import Lease, Shortage
from pools.ledger import Ledger, State, Usage
from pools.plan import MemoryPlan
from pools.prefix import HOLDER, PrefixCache


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Use of the three pools. `kept`: held pages of past requests that no lease reads: as good as free."""

    rows: Usage
    pages: Usage
    slots: Usage
    kept: int


class Pools:
    """Who holds which row, page and slot. Knows numbers only: the memory is in `pools.storage`.

    A request needs one row, `slots_per_request` slots (0: the model has no recurrent layers) and the pages for its
    tokens, at most `max_pages_per_request` (0: the model has no paged layers). A holder, named by its attempt's id,
    has one lease at a time, fenced ones included.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        num_pages: int,
        num_slots: int,
        page_size: int,
        max_pages_per_request: int,
        slots_per_request: int,
    ) -> None:
        self.page_size = page_size
        self.max_pages_per_request = max_pages_per_request
        self.slots_per_request = slots_per_request
        self._rows = Ledger("row", num_rows)
        self._pages = Ledger("page", num_pages)
        self._slots = Ledger("slot", num_slots)
        self._held: dict[str, Lease] = {}
        self._fenced: dict[str, Lease] = {}
        self._prefixes = PrefixCache()

    @classmethod
    def from_plan(cls, plan: MemoryPlan) -> Pools:
        """The pools that a memory plan describes, all free."""
        return cls(
            num_rows=plan.num_rows,
            num_pages=plan.num_pages,
            num_slots=plan.num_slots,
            page_size=plan.request.page_size,
            max_pages_per_request=plan.max_pages_per_request,
            slots_per_request=plan.slots_per_request,
        )

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens. Changes nothing.

        Raises RequestTooLong when not even empty pools would have them, ValueError when `tokens` is below 1.
        """
        if tokens < 1:
            raise ValueError(f"a request has at least one token, not {tokens}")
        if self.max_pages_per_request == 0:
            return 0
        needed = -(-tokens // self.page_size)
        most = min(self.max_pages_per_request, self._pages.count)
        if needed > most:
            raise RequestTooLong(
                f"{tokens} tokens need {needed} pages of {self.page_size}, and one request can have {most} "
                f"({most * self.page_size} tokens)"
            )
        return needed

    def shortage(self, tokens: int, chain: Sequence[bytes] = ()) -> Shortage | None:
        """What `reserve` would lack now; None when it would succeed. Changes nothing. Raises as `pages_for`."""
        shared = self._prefixes.match(chain)
        free = self._pages.usage.free + self._prefixes.spare_without(shared)
        lacking = Shortage(
            rows=max(0, 1 - self._rows.usage.free),
            pages=max(0, self.pages_for(tokens) - len(shared) - free),
            slots=max(0, self.slots_per_request - self._slots.usage.free),
        )
        return lacking if lacking.rows or lacking.pages or lacking.slots else None

    def reserve(self, holder: str, tokens: int, chain: Sequence[bytes] = ()) -> Lease | Shortage:
        """Take everything that a request of `tokens` tokens needs, or nothing.

        `chain` names the whole pages of tokens that the request begins with (`pools.prefix.chain_of`): those that are
        kept are shared. Raises SecondLease, and as `pages_for`.
        """
        if holder in self._held or holder in self._fenced:
            kind = "a fenced" if holder in self._fenced else "a"
            raise SecondLease(f"{holder!r} has {kind} lease and asks for another")
        if shortage := self.shortage(tokens, chain):
            return shortage
        shared = self._prefixes.pin(chain)
        needed = self.pages_for(tokens) - len(shared)
        evicted = self._prefixes.evict(max(0, needed - self._pages.usage.free))
        self._pages.release(evicted, HOLDER)
        (row,) = self._taken(self._rows, 1, holder)
        pages = self._taken(self._pages, needed, holder)
        slots = self._taken(self._slots, self.slots_per_request, holder)
        lease = Lease(holder, row, pages, slots, shared)
        self._held[holder] = lease
        return lease

    def check(self, lease: Lease) -> Lease:
        """The lease, which is held and not fenced; otherwise raises UseAfterRelease. Changes nothing."""
        # By identity: a lease given back can equal one taken later.
        if self._held.get(lease.holder) is not lease:
            raise UseAfterRelease(f"{lease.holder!r} uses a lease (row {lease.row}) that it no longer holds")
        return lease

    def release(self, lease: Lease, chain: Sequence[bytes] = ()) -> Lease:
        """All of `lease` becomes free, but for whole pages that `chain` names: those are kept, if they are new.

        Returns it with what has become free (for `Storage.wipe`). Raises DoubleRelease, ForeignRelease.
        """
        self._give_up(lease)
        self._rows.release((lease.row,), lease.holder)
        self._slots.release(lease.slots, lease.holder)
        self._prefixes.unpin(lease.shared)
        own = lease.pages[: max(0, len(chain) - len(lease.shared))]
        kept = self._prefixes.keep(chain, own) if own else ()
        self._pages.pass_on(kept, lease.holder, HOLDER)
        freed = tuple(page for page in lease.pages if page not in set(kept)) if kept else lease.pages
        self._pages.release(freed, lease.holder)
        return replace(lease, pages=freed) if kept else lease

    def fence(self, lease: Lease) -> None:
        """The request has ended, but a remote writer might still write to its memory: nobody gets any of it.

        The row is fenced with the rest, so that a lease is in one state as a whole. Raises as `release`.
        """
        self._give_up(lease)
        self._rows.fence((lease.row,), lease.holder)
        self._pages.fence(lease.pages, lease.holder)
        self._slots.fence(lease.slots, lease.holder)
        self._fenced[lease.holder] = lease

    def unfence(self, holder: str) -> Lease:
        """No one can write to the holder's fenced memory any more: it becomes free. Returns the lease, as `release`.

        Raises DoubleRelease when the holder has nothing, ForeignRelease when its lease is not fenced.
        """
        if holder not in self._fenced:
            if holder in self._held:
                raise ForeignRelease(f"the lease of {holder!r} is held, not fenced: release it")
            raise DoubleRelease(f"{holder!r} has no fenced lease to free")
        lease = self._fenced.pop(holder)
        self._rows.unfence((lease.row,), holder)
        self._pages.unfence(lease.pages, holder)
        self._slots.unfence(lease.slots, holder)
        self._prefixes.unpin(lease.shared)
        return lease

    def stats(self) -> PoolStats:
        """Free, held and fenced of each pool. Changes nothing."""
        return PoolStats(self._rows.usage, self._pages.usage, self._slots.usage, self._prefixes.spare)

    def audit(self) -> None:
        """Check every invariant: the ledgers, and that the leases account for all that is not free.

        Changes nothing; takes time in proportion to the pools' sizes. Raises AuditFailed.
        """
        leases = [*self._held.values(), *self._fenced.values()]
        self._audit(self._rows, leases, [(lease.row,) for lease in leases])
        cache = Lease(HOLDER, -1, tuple(self._prefixes.pages), ())
        self._audit(self._pages, [*leases, cache], [lease.pages for lease in (*leases, cache)])
        self._audit(self._slots, leases, [lease.slots for lease in leases])
        readers = Counter(page for lease in leases for page in lease.shared)
        if readers != self._prefixes.pins or not readers.keys() <= set(cache.pages):
            raise AuditFailed(f"leases read {dict(readers)} of the prefix cache; it counts {self._prefixes.pins}")

    def _audit(self, ledger: Ledger, leases: list[Lease], leased: list[tuple[int, ...]]) -> None:
        ledger.audit()
        named: set[int] = set()
        for lease, indexes in zip(leases, leased, strict=True):
            state = State.FENCED if lease.holder in self._fenced else State.HELD
            for index in indexes:
                found = (ledger.state(index), ledger.holder(index))
                if found != (state, lease.holder):
                    raise AuditFailed(f"{lease.holder!r} leases {ledger.name} {index}; its ledger has {found}")
            if len(set(indexes)) != len(indexes) or not named.isdisjoint(indexes):
                raise AuditFailed(f"a {ledger.name} of {lease.holder!r} is leased twice")
            named.update(indexes)
        if len(named) != ledger.usage.held + ledger.usage.fenced:
            raise AuditFailed(f"the leases name {len(named)} {ledger.name}s; the ledger has {ledger.usage}")

    def _taken(self, ledger: Ledger, number: int, holder: str) -> tuple[int, ...]:
        """Take what `shortage` has just found to be there."""
        taken = ledger.take(number, holder)
        if taken is None:
            raise LedgerError(f"{number} {ledger.name}s were free a moment ago: {ledger.usage}")
        return taken

    def _give_up(self, lease: Lease) -> None:
        if self._held.get(lease.holder) is lease:
            del self._held[lease.holder]
            return
        owner = self._rows.holder(lease.row) if 0 <= lease.row < self._rows.count else None
        if owner is None:
            raise DoubleRelease(f"{lease.holder!r} gives back its lease (row {lease.row}) again")
        raise ForeignRelease(
            f"{lease.holder!r} gives back an old or foreign lease; row {lease.row} is {owner!r}'s now"
        )
