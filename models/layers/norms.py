"""Root-mean-square norms (Zhang & Sennrich 2019, arXiv:1910.07467), computed in float32."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.architecture import Norm


class RmsNorm(nn.Module):
    """Norm over the last dimension, of `size` elements."""

    def __init__(self, size: int, norm: Norm) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, size) to the same shape and dtype."""
        weight = self.weight.float() + 1.0 if self.norm.unit_offset else self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.norm.eps).to(x.dtype)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition: x divided by the root of its mean square."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def grouped_rms_norm(x: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """(…, n) float32, each of `groups` equal parts of the last dimension normalised on its own."""
    parts = x.reshape(*x.shape[:-1], groups, -1)
    return F.rms_norm(parts, parts.shape[-1:], eps=eps).flatten(-2) * weight
