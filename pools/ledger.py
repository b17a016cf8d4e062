"""Who holds which of the integers 0 … count-1: rows, pages and slots are all counted here.

    FREE ──take──▶ HELD ──release──▶ FREE
                    │
                    └───fence──▶ FENCED ──unfence──▶ FREE

A *fenced* number has no user any more, but a remote writer might still write to what it stands for, so nobody may
have it yet. Always `free + held + fenced == count`. Every operation costs time in proportion to the numbers it
moves, and changes nothing at all when it raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pools.errors import AuditFailed, DoubleRelease, ForeignRelease, LedgerError, UseAfterRelease


class State(Enum):
    """What may be done with a number."""

    FREE = "free"
    HELD = "held"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Usage:
    """How many of a pool's numbers are in each state."""

    free: int
    held: int
    fenced: int


class Ledger:
    """Hands out the integers 0 … `count`-1, each to at most one holder. `name` (“page”, say) is for messages."""

    def __init__(self, name: str, count: int) -> None:
        if count < 0:
            raise ValueError(f"a ledger of {name}s needs a count of 0 or more, not {count}")
        self.name = name
        self.count = count
        self._state = [State.FREE] * count
        self._holder = [""] * count
        # A stack with the lowest on top, to which numbers go back in the order that makes them come out ascending
        # again: neighbours stay together, and a hand-off moves them as one range.
        self._free = list(range(count - 1, -1, -1))
        self._fenced = 0

    @property
    def usage(self) -> Usage:
        """The counts now. Changes nothing."""
        free = len(self._free)
        return Usage(free=free, held=self.count - free - self._fenced, fenced=self._fenced)

    def state(self, index: int) -> State:
        """What may be done with `index` now. Changes nothing."""
        return self._state[index]

    def holder(self, index: int) -> str | None:
        """Who holds `index`, or fenced it; None when it is free. Changes nothing."""
        return None if self._state[index] is State.FREE else self._holder[index]

    def take(self, number: int, holder: str) -> tuple[int, ...] | None:
        """Give `holder` that many, all or none: None, and nothing changed, when too few are free.

        Raises ValueError when `number` is negative.
        """
        if number < 0:
            raise ValueError(f"cannot take {number} {self.name}s")
        keep = len(self._free) - number
        if keep < 0:
            return None
        taken = tuple(reversed(self._free[keep:]))
        del self._free[keep:]
        for index in taken:
            self._state[index] = State.HELD
            self._holder[index] = holder
        return taken

    def release(self, indexes: Sequence[int], holder: str) -> None:
        """Held numbers become free. Raises DoubleRelease, ForeignRelease."""
        self._move(indexes, holder, State.HELD, State.FREE)

    def pass_on(self, indexes: Sequence[int], holder: str, to: str) -> None:
        """Held numbers get another holder. Raises DoubleRelease, ForeignRelease."""
        self._move(indexes, holder, State.HELD, State.HELD)
        for index in indexes:
            self._holder[index] = to

    def fence(self, indexes: Sequence[int], holder: str) -> None:
        """Held numbers become fenced: given up, but not free yet. Raises DoubleRelease, ForeignRelease."""
        self._move(indexes, holder, State.HELD, State.FENCED)
        self._fenced += len(indexes)

    def unfence(self, indexes: Sequence[int], holder: str) -> None:
        """Fenced numbers become free: no one can write there any more. Raises DoubleRelease, ForeignRelease."""
        self._move(indexes, holder, State.FENCED, State.FREE)
        self._fenced -= len(indexes)

    def check(self, indexes: Sequence[int], holder: str) -> None:
        """Raise UseAfterRelease unless `holder` holds all `indexes`. Changes nothing."""
        for index in indexes:
            if self._fault(index, holder, State.HELD):
                raise UseAfterRelease(f"{holder!r} uses {self.name} {index} without holding it")

    def audit(self) -> None:
        """Count everything afresh and compare. Changes nothing; O(count). Raises AuditFailed."""
        counted = Counter(self._state)
        found = Usage(free=counted[State.FREE], held=counted[State.HELD], fenced=counted[State.FENCED])
        if found != self.usage:
            raise AuditFailed(f"{self.name}s: counted {found}, booked {self.usage}, of {self.count}")
        listed = set(self._free)
        if len(listed) != len(self._free) or any(self._state[index] is not State.FREE for index in listed):
            raise AuditFailed(f"{self.name}s: the free list names one twice, or one that is not free")

    def _move(self, indexes: Sequence[int], holder: str, source: State, target: State) -> None:
        if len(set(indexes)) != len(indexes):
            raise DoubleRelease(f"{holder!r} gives back some {self.name} twice at once: {list(indexes)}")
        for index in indexes:
            if fault := self._fault(index, holder, source):
                raise fault
        for index in indexes:
            self._state[index] = target
        if target is State.FREE:
            self._free.extend(reversed(indexes))

    def _fault(self, index: int, holder: str, expected: State) -> LedgerError | None:
        """What is wrong with `holder` treating `index` as `expected`; None when nothing is."""
        if not 0 <= index < self.count:
            return ForeignRelease(f"{holder!r} names {self.name} {index}, and there are {self.count}")
        state, owner = self._state[index], self._holder[index]
        if state is State.FREE:
            return DoubleRelease(f"{holder!r} gives back {self.name} {index}, which is free already")
        if owner != holder:
            return ForeignRelease(f"{holder!r} gives back {self.name} {index}, which is {state.value} by {owner!r}")
        if state is not expected:
            return ForeignRelease(
                f"{holder!r} gives back {self.name} {index} as {expected.value}, but it is {state.value}"
            )
        return None
