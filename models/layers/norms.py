"""Root-mean-square norms (Zhang & Sennrich 2019, arXiv:1910.07467), computed in float32."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.layers.ranks import Ranks
from models.parts.basics import Norm
from pools.spec import share


class RmsNorm(nn.Module):
    """Norm over the last dimension, of `size` elements."""

    def __init__(self, size: int, norm: Norm) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(size)) if norm.weighted else None
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, size) to the same shape and dtype."""
        weight = None if self.weight is None else self.weight.float()
        if weight is not None and self.norm.unit_offset:
            weight = weight + 1.0
        return F.rms_norm(x.float(), (self.size,), weight, self.norm.eps).to(x.dtype)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition: x divided by the root of its mean square."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class GroupedRmsNorm(nn.Module):
    """Each of `groups` equal parts of `channels` normalised on its own.

    Ranks share the channels by `units` (heads), which are replicated where there are fewer than ranks. With fewer
    groups than ranks, the ranks that share a group add up its squares.
    """

    def __init__(self, channels: int, groups: int, units: int, norm: Norm, ranks: Ranks) -> None:
        super().__init__()
        mine = len(share(units, ranks.rank, ranks.size))
        self.copies = max(1, ranks.size // units)
        self.weight = nn.Parameter(torch.empty(mine * (channels // units)))
        self.norm = norm
        self.ranks = ranks
        self.groups = groups
        self.width = channels // groups
        self.mine = share(groups, ranks.rank, ranks.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, this rank's channels) float32 to the same shape."""
        parts = x.reshape(len(x), len(self.mine), -1)
        squares = parts.square().sum(-1)
        if self.groups < self.ranks.size:
            everyones = squares.new_zeros(len(x), self.groups)
            everyones[:, self.mine.start : self.mine.stop] = squares
            squares = self.ranks.sum(everyones)[:, self.mine.start : self.mine.stop] / self.copies
        scale = torch.rsqrt(squares / self.width + self.norm.eps)
        y: torch.Tensor = (parts * scale[..., None]).flatten(-2) * self.weight.float()
        return y
