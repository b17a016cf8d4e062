"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from models.batch import Batch
from models.layers.convolution import Convolution
from models.layers.ranks import Ranks, SumLinear
from models.layers.rotary import Rotations
from models.parts.short_conv import ShortConv


class ShortConvLayer(nn.Module):
    """State: `conv`, see Convolution, of B × x."""

    def __init__(self, part: ShortConv, hidden_size: int, ranks: Ranks) -> None:
        super().__init__()
        part = part.share(ranks.size)
        self.input = nn.Linear(hidden_size, 3 * part.channels, bias=part.bias)
        self.conv = Convolution(part.channels, part.conv_width, bias=part.bias, activated=False)
        self.out = SumLinear(part.channels, hidden_size, bias=part.bias, ranks=ranks)

    def forward(
        self, x: torch.Tensor, batch: Batch, state: Mapping[str, torch.Tensor], rotations: Rotations
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden); moves the windows in their slots forward."""
        before, after, inner = self.input(x).chunk(3, dim=-1)
        output: torch.Tensor = self.out(after * self.conv(before * inner, batch, state["conv"]).to(x.dtype))
        return output
