"""Asks that overtook their task: the gateway's and prefill's messages to decode come by different sockets."""

from __future__ import annotations

from decode.peers import PrefillPeer
from wire.messages import Ask, AttemptId

_KEPT_S = 30.0
_MOST = 10_000


class EarlyAsks:
    """Kept until their task comes, boundedly in number and time."""

    def __init__(self) -> None:
        self._asks: dict[AttemptId, tuple[PrefillPeer, Ask, float]] = {}

    def put(self, peer: PrefillPeer, ask: Ask, now: float) -> None:
        """Keep one, if there is room; prefill asks again in any case."""
        if len(self._asks) < _MOST:
            self._asks[ask.attempt] = (peer, ask, now)

    def pop(self, attempt: AttemptId) -> tuple[PrefillPeer, Ask] | None:
        """The one that has come for this attempt, and who sent it."""
        found = self._asks.pop(attempt, None)
        return (found[0], found[1]) if found else None

    def expire(self, now: float) -> None:
        """Drop those whose task has not come for long."""
        for attempt, (_, _, came) in list(self._asks.items()):
            if now - came > _KEPT_S:
                del self._asks[attempt]
