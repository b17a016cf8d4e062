"""Tensor parallelism inside a worker: what ranks say to one another during a forward step (Shoeybi et al. 2019,
arXiv:1909.08053).

Each rank computes its heads, channels and experts; sums over ranks follow the projections back to the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pools.spec import share_unevenly


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the `size` ranks of a worker, which all run the same steps at the same time."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on every rank: the same bits on each. May change `x` in place."""
        if self.size > 1:
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`, all of one shape, in the order of ranks."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts


SINGLE = Ranks()
"""A worker of one process."""


class SumLinear(nn.Linear):
    """A linear layer whose inputs are shared out over ranks: each adds its part, and the bias comes once."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, ranks: Ranks) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, my inputs) to (…, outputs), the same on every rank."""
        y = self.ranks.sum(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class SharedEmbedding(nn.Module):
    """Token embeddings and the head's projection over a vocabulary whose rows are shared out over ranks."""

    def __init__(self, vocab: int, hidden: int, ranks: Ranks) -> None:
        super().__init__()
        self.vocab = vocab
        self.ranks = ranks
        self.mine = share_unevenly(vocab, ranks.rank, ranks.size)
        self.weight = nn.Parameter(torch.empty(len(self.mine), hidden))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(T,) to (T, hidden), the same on every rank."""
        if self.ranks.size == 1:
            return F.embedding(token_ids, self.weight)
        held = (token_ids >= self.mine.start) & (token_ids < self.mine.stop)
        x = self.weight.new_zeros(len(token_ids), self.weight.shape[1])
        x[held] = self.weight[token_ids[held] - self.mine.start]
        return self.ranks.sum(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(B, hidden) to (B, vocab), the same on every rank."""
        mine = F.linear(x, self.weight)
        if self.ranks.size == 1:
            return mine
        widest = len(share_unevenly(self.vocab, 0, self.ranks.size))
        return torch.cat(self.ranks.gather(F.pad(mine, (0, widest - len(self.mine)))), dim=1)[:, : self.vocab]
