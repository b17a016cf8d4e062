"""A checked state machine with time stamps: the life of a request or of a hand-off.

Each kind of life is one enum, one table of allowed moves and the diagram above them; see `prefill.request`,
`decode.request` and `transfer.handoff`. The stamps are the latency report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from enum import Enum
from typing import Any, Generic, TypeVar

State = TypeVar("State", bound=Enum)


class IllegalMove(Exception):  # noqa: N818 - named by what happened
    """A move that the table does not allow: a bug of ours, never of a request."""


class Life(Generic[State]):
    """Starts in `start` at `now` (seconds, monotonic). `stamps` holds when each state was entered."""

    def __init__(self, table: Mapping[State, Set[State]], start: State, now: float) -> None:
        self._table = table
        self.state = start
        self.stamps: dict[State, float] = {start: now}

    def move(self, to: State, now: float) -> None:
        """Enter `to`. Raises IllegalMove when the table does not allow it from here."""
        if to not in self._table[self.state]:
            raise IllegalMove(f"{type(to).__name__}: {self.state.name} to {to.name} is not allowed")
        self.state = to
        self.stamps[to] = now

    @property
    def ended(self) -> bool:
        """Whether no move leads out of here."""
        return not self._table[self.state]


def oldest_age(lives: Iterable[Life[Any]], now: float) -> float:
    """Seconds since the first of these lives began; 0 when there is none."""
    return now - min((min(life.stamps.values()) for life in lives), default=now)
