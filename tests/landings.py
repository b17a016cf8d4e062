"""Both ends of any transfer back end, for tests of what all of them must do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import zmq

from pools.layout import PoolLayout
from transfer.media import MEDIA, PoolMemory, open_channel, open_landing, unusable
from transfer.medium import Channel, Landing, never
from transfer.plan import Range
from transfer.reshard import Reshard
from transfer.segment import Segment
from wire.messages import AttemptId

EVERY_MEDIUM = [
    pytest.param(medium, marks=pytest.mark.skipif(bool(reason), reason=str(reason)))
    for medium in MEDIA
    for reason in [unusable(medium)]
]


@dataclass
class Pair:
    """A source block, a target block (uint8), and how to connect them."""

    medium: str
    source: np.ndarray
    target: np.ndarray
    landing: Landing
    reshard: Reshard
    context: zmq.Context[zmq.Socket[bytes]]

    def connect(self, reach: str | None = None) -> Channel:
        """A new channel. `reach`: another way to the landing than the straight one."""
        source = torch.from_numpy(self.source)
        return open_channel(self.medium, reach or self.landing.reach, self.context, source, self.reshard)


@contextmanager
def pair_of(medium: str, reshard: Reshard, seed: int = 1) -> Iterator[Pair]:
    """A source of random bytes and a target of zeros, laid out as the reshard says."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    source = np.random.default_rng(seed).integers(0, 256, reshard.source.nbytes, dtype=np.uint8)
    segment = Segment.create("test", reshard.target.nbytes) if medium == "shm" else None
    size = reshard.target.nbytes
    block = (
        torch.frombuffer(segment.memory, dtype=torch.uint8)[:size]
        if segment
        else torch.zeros(size, dtype=torch.uint8)
    )
    landing = open_landing(medium, PoolMemory(block, segment), context, "tcp://127.0.0.1:*")
    try:
        yield Pair(medium, source, block.numpy(), landing, reshard, context)
    finally:
        landing.close()
        context.destroy(linger=0)


def plain(layout: PoolLayout) -> Reshard:
    """Between two workers that are alike."""
    return Reshard.between(layout.spec, layout, layout)


class GatedChannel:
    """A channel that waits at each write until it is let through: a writer that was stopped and wakes up late."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def write(self, attempt: AttemptId, ranges: Sequence[Range], cancelled: Callable[[], bool] = never) -> None:
        self.entered.release()
        assert self.gate.acquire(timeout=20)
        self._inner.write(attempt, ranges)

    def wait(self, attempt: AttemptId, cancelled: Callable[[], bool] = never) -> None:
        self._inner.wait(attempt, cancelled)

    def abandon(self, attempt: AttemptId) -> None:
        self._inner.abandon(attempt)

    def close(self) -> None:
        self._inner.close()
