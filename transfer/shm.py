"""Shared memory: the prefill worker writes straight into the decode worker's pools. One copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transfer.errors import MediumUnusable
from transfer.plan import LeasedMemory, Range
from transfer.segment import Segment, SegmentReach
from wire.messages import AttemptId


class ShmLanding:
    """Decode side: the pools lie in a segment, and that is all there is to do."""

    peer_writes = True

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @property
    def reach(self) -> str:
        """The segment's description."""
        return self._segment.reach.to_json()

    def open(self, attempt: AttemptId, memory: LeasedMemory) -> None:
        """Nothing to do: the peer keeps to what `Reserved` told it."""

    def close_attempt(self, attempt: AttemptId) -> int | None:
        """Nothing can be closed and nothing is seen: the fence does the rest."""
        return None

    def close(self) -> None:
        """Give up the segment."""
        self._segment.close()


class ShmChannel:
    """Prefill side. `source` is this worker's pool memory, uint8, `(nbytes,)`."""

    def __init__(self, source: np.ndarray, reach: str, target_nbytes: int) -> None:
        segment_reach = SegmentReach.from_json(reach)
        if segment_reach.nbytes != target_nbytes:
            raise MediumUnusable(
                f"the peer's shared memory has {segment_reach.nbytes} bytes, its pools {target_nbytes}"
            )
        self._segment = Segment.attach(segment_reach)
        self._source = source
        self._target = np.frombuffer(self._segment.memory, dtype=np.uint8)

    def write(self, attempt: AttemptId, ranges: Sequence[Range]) -> None:
        """Copy; numpy lets other threads run while it does."""
        source, target = self._source, self._target
        for start, there, nbytes in ranges:
            target[there : there + nbytes] = source[start : start + nbytes]

    def close(self) -> None:
        """Unmap."""
        self._segment.close()
