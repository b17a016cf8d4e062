"""The contract of a transfer back end.

A medium only moves bytes: pairing, ordering, cancelling and error news are the same for all and live above it
(`transfer.plan`, `transfer.sender`, the workers). To add one: a file with a `Landing` (decode side) and a `Channel`
(prefill side), and a line in `transfer.media`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transfer.plan import LeasedMemory, Range
from wire.messages import AttemptId


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
    """Prefill side: one connection to one decode worker's pool memory, used by one thread."""

    def write(self, attempt: AttemptId, ranges: Sequence[Range]) -> None:
        """Return when all bytes are at their destination. Raises TransferError, and then the attempt has failed."""
        ...

    def close(self) -> None:
        """Give up the connection. Called from the thread that writes."""
        ...
