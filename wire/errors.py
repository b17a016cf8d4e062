"""What can go wrong on the wire.

WireError
├── BadMessage   the bytes are not a message of this protocol
└── LinkFull     the other side does not read; the bounded queue is full
"""

from __future__ import annotations


class WireError(Exception):
    """Root of everything that `wire` raises."""


class BadMessage(WireError):  # noqa: N818 - named by what happened
    """The bytes are not a valid message; the text says what is wrong with them."""


class LinkFull(WireError):  # noqa: N818
    """The peer does not take messages and the bounded queue to it is full."""
