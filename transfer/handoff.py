"""The life of one hand-off, kept by both sides.

    WAITING ──Reserved──▶ RESERVED ──first write──▶ MOVING ──all written──▶ LANDED
       │                     │                        │
       └──── cancel, fail, deadline ──────────────────┴──▶ ABORTING ──Quiet──▶ GONE

    state     decode holds   prefill holds   who may write decode's memory
    WAITING   nothing        perhaps         nobody
    RESERVED  its lease      perhaps         prefill
    MOVING    its lease      its lease       prefill
    LANDED    its lease      until Taken     decode
    ABORTING  fenced lease   until quiet     prefill, perhaps still
    GONE      nothing        nothing         –

Decode cannot see a write by shared memory, so it goes from RESERVED to LANDED directly. Memory is not given back
when a request is cancelled but when the writer has said `Quiet`, or can no longer write.
"""

from __future__ import annotations

from enum import Enum, auto


class HandoffState(Enum):
    """Where a hand-off stands."""

    WAITING = auto()
    RESERVED = auto()
    MOVING = auto()
    LANDED = auto()
    ABORTING = auto()
    GONE = auto()


_S = HandoffState
ALLOWED: dict[HandoffState, frozenset[HandoffState]] = {
    _S.WAITING: frozenset({_S.RESERVED, _S.GONE}),
    _S.RESERVED: frozenset({_S.MOVING, _S.LANDED, _S.ABORTING}),
    _S.MOVING: frozenset({_S.LANDED, _S.ABORTING}),
    _S.LANDED: frozenset({_S.GONE}),
    _S.ABORTING: frozenset({_S.GONE}),
    _S.GONE: frozenset(),
}
