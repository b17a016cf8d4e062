"""What can go wrong in the pools.

    PoolError
    ├── PlanRefused            sizes that cannot work: a configuration error
    ├── RequestTooLong         a request that no lease of these pools could ever hold: the request's fault
    └── LedgerError            a broken invariant: our fault, and the end of the worker
        ├── DoubleRelease      given back twice
        ├── ForeignRelease     given back by one who does not hold it, or does not hold it that way
        ├── UseAfterRelease    used after it was given back
        ├── SecondLease        a holder that has a lease asked for another
        └── AuditFailed        the books do not add up

Having no room *now* is no error: `Pools.reserve` answers with a `Shortage`, and admission waits.
"""

from __future__ import annotations


class PoolError(Exception):
    """Root of everything that the pools raise on purpose."""


class PlanRefused(PoolError):  # noqa: N818 - named by what happened
    """The sizes asked for cannot work; the text gives the numbers and what to change."""


class RequestTooLong(PoolError):  # noqa: N818
    """The request has more tokens than any lease of these pools could hold, however long it waits."""


class LedgerError(PoolError):
    """Who holds what has become untrue; going on would corrupt some request's state."""


class DoubleRelease(LedgerError):  # noqa: N818
    """Given back although it had been given back before."""


class ForeignRelease(LedgerError):  # noqa: N818
    """Given back by one who does not hold it, or does not hold it that way (fenced, say)."""


class UseAfterRelease(LedgerError):  # noqa: N818
    """Used by one who has given it back."""


class SecondLease(LedgerError):  # noqa: N818
    """A holder has one lease at a time, and this one asked for a second."""


class AuditFailed(LedgerError):  # noqa: N818
    """An audit found books that do not add up."""
