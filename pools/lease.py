"""All that one request holds in the pools, and what is missing when it cannot be had."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """A request's row, pages and slots: taken all or nothing, given back once and whole.

    `holder` is the attempt's id. `pages` stand in token order; `slots` are the request's own and then its tracking
    slots. A model without paged layers leaves `pages` empty, one without recurrent layers leaves `slots` empty.
    `shared` are the pages before those, of a prefix that others may read too: never written.
    """

    holder: str
    row: int
    pages: tuple[int, ...]
    slots: tuple[int, ...]
    shared: tuple[int, ...] = ()

    @property
    def token_pages(self) -> tuple[int, ...]:
        """All pages in token order."""
        return self.shared + self.pages


@dataclass(frozen=True, slots=True)
class Shortage:
    """How many more rows, pages and slots would have to be free; 0 where there are enough."""

    rows: int
    pages: int
    slots: int

    def __str__(self) -> str:
        lacks = (("row", self.rows), ("page", self.pages), ("slot", self.slots))
        return "lacks " + ", ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in lacks if n)
