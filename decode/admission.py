"""May landed requests have a place in the batch now? And how long may one wait for memory? Pure.

A request is admitted with all the memory it can ever need, its prompt's and its longest answer's. So a running
request never lacks memory, and whoever waits is served in the end: what the running ones hold always comes back.
"""

from __future__ import annotations

MAX_OVERTAKEN = 16
"""How many requests behind one that waits for memory may get theirs first: small ones pass a large one, boundedly."""


def join(ready: int, running: int, max_running_requests: int) -> int:
    """How many landed requests may join the running ones, which never exceed `max_running_requests`.

    The `pre_alloc_size` rows beyond them hold hand-offs that land meanwhile.
    """
    return max(0, min(ready, max_running_requests - running))
