"""What can go wrong while state moves.

TransferError
├── MediumUnusable   this back end cannot connect these two processes
├── PeerGone         the other side no longer answers
└── OutOfLease       a range that would touch memory outside the request's lease
"""

from __future__ import annotations


class TransferError(Exception):
    """Root of everything that `transfer` raises; it ends one attempt, never a worker."""


class MediumUnusable(TransferError):  # noqa: N818 - named by what happened
    """A back end cannot connect these two processes; the text says why."""


class PeerGone(TransferError):  # noqa: N818
    """The other side does not answer in time, or its memory has been closed."""


class OutOfLease(TransferError):  # noqa: N818
    """A range lies outside the pages and slots that were reserved for the attempt."""
