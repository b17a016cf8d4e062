"""Tensor-parallel ranks as threads of this process, which meet at barriers instead of in a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from models.layers.ranks import Ranks

T = TypeVar("T")
PATIENCE_S = 60


class Meeting:
    """Where the ranks of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._brought: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """What every rank has brought, in the order of ranks."""
        self._brought[rank] = x
        self._barrier.wait(PATIENCE_S)
        everyones = list(self._brought)
        self._barrier.wait(PATIENCE_S)
        return everyones


@dataclass(frozen=True, slots=True)
class ThreadRanks(Ranks):
    """As `Ranks`, over a `Meeting`."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self.meeting.exchange(self.rank, x)


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """`work` on every one of `size` ranks at once; what each returned."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadRanks(rank, size, None, meeting) for rank in range(size)]))
