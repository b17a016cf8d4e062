"""May requests have memory, or a place in the batch, now? Pure.

A request is admitted with all the memory it can ever need, its prompt's and its longest answer's. So a running
request never lacks memory, and whoever waits is served in the end: what the running ones hold always comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """Rows, pages and slots: what is free, or what a request needs."""

    rows: int
    pages: int
    slots: int


def admit(waiting: Sequence[Room], free: Room) -> int:
    """How many requests from the head of the queue fit what is free.

    In order: a small request does not overtake a large one, which would otherwise wait for ever.
    """
    rows, pages, slots = free.rows, free.pages, free.slots
    for count, need in enumerate(waiting):
        rows, pages, slots = rows - need.rows, pages - need.pages, slots - need.slots
        if min(rows, pages, slots) < 0:
            return count
    return len(waiting)


def join(ready: int, running: int, max_running_requests: int) -> int:
    """How many landed requests may join the running ones, which never exceed `max_running_requests`.

    The `pre_alloc_size` rows beyond them hold hand-offs that land meanwhile.
    """
    return max(0, min(ready, max_running_requests - running))
