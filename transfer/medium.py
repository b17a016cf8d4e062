"""The contract of a transfer back end.

A medium only moves bytes: pairing, ordering, cancelling and error news are the same for all and live above it
(`transfer.plan`, `transfer.sender`, the workers). To add one: a file with a `Landing` (decode side), a `Channel`
(prefill side) and `unusable`, and a line in `transfer.media`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from transfer.plan import LeasedMemory, Range
from wire.messages import AttemptId

SILENCE_S = 30.0
"""After so long without an answer the other side counts as gone."""


def never() -> bool:
    """What nobody cancels."""
    return False


class Landing(Protocol):
    """Decode side: lets prefill workers put bytes into this worker's pool memory."""

    peer_writes: bool
    """Whether the peer itself writes this memory, so that freed memory must stay fenced until the peer is quiet."""

    @property
    def reach(self) -> str:
        """How a prefill worker connects; only the medium's own `Channel` understands it."""
        ...

    def open(self, attempt: AttemptId, memory: LeasedMemory) -> None:
        """Accept bytes for this attempt, into this memory only."""
        ...

    def close_attempt(self, attempt: AttemptId) -> int | None:
        """Accept no more; returns the bytes that arrived, or None when the medium cannot see them.

        Where `peer_writes` is false, nothing is written for the attempt after this returns.
        """
        ...

    def close(self) -> None:
        """Stop for good."""
        ...


class Channel(Protocol):
    """Prefill side: one connection to one decode rank's pool memory, used by one thread.

    `cancelled` is asked while waiting for the peer: when it says so, the call returns at once.
    """

    def write(self, attempt: AttemptId, ranges: Sequence[Range], cancelled: Callable[[], bool] = never) -> None:
        """Begin to move; may return before the bytes are there, which must stay as they are until `wait` returns.

        Raises TransferError, and then the attempt has failed.
        """
        ...

    def wait(self, attempt: AttemptId, cancelled: Callable[[], bool] = never) -> None:
        """Return when all that was written for the attempt is at its destination. Raises TransferError."""
        ...

    def abandon(self, attempt: AttemptId) -> None:
        """The attempt is over. When this returns, this side writes nothing more to memory that it writes itself."""
        ...

    def close(self) -> None:
        """Give up the connection. Called from the thread that writes."""
        ...
