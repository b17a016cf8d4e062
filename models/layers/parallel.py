"""Parts side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from models.batch import Batch
from models.layers.rotary import Rotations
from models.parts.parallel import Parallel


class ParallelLayer(nn.Module):
    """The sum of branches that all see the same input. State: that of all of them."""

    def __init__(self, parallel: Parallel, branches: list[nn.Module]) -> None:
        super().__init__()
        self.parallel = parallel
        self.branches = nn.ModuleList(branches)

    def forward(
        self, x: torch.Tensor, batch: Batch, state: Mapping[str, torch.Tensor], rotations: Rotations
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden)."""
        outputs = [
            layer(x * branch.input_multiplier, batch, state, rotations) * branch.output_multiplier
            for layer, branch in zip(self.branches, self.parallel.branches, strict=True)
        ]
        return torch.stack(outputs).sum(0)
