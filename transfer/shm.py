"""Shared memory: the prefill worker writes straight into the decode worker's pools. One copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from transfer.copying import copy
from transfer.errors import MediumUnusable
from transfer.medium import never
from transfer.plan import LeasedMemory, Range
from transfer.segment import Segment, SegmentReach
from wire.messages import AttemptId


def unusable() -> str | None:
    """Why this process cannot share memory; None when it can."""
    try:
        Segment.create("probe", 1).close()
    except MediumUnusable as error:
        return str(error)
    return None


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

    def write(self, attempt: AttemptId, ranges: Sequence[Range], cancelled: Callable[[], bool] = never) -> None:
        """Copy; all is there when this returns."""
        copy(self._source, self._target, ranges)

    def wait(self, attempt: AttemptId, cancelled: Callable[[], bool] = never) -> None:
        """Nothing is on its way."""

    def abandon(self, attempt: AttemptId) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """Unmap."""
        self._segment.close()
