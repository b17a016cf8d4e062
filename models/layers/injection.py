"""A transformer block whose weights several layers share (Zamba2: Glorioso et al. 2024, arXiv:2411.15242)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from models.batch import Batch
from models.layers.attention import AttentionLayer
from models.layers.mlp import MlpLayer, inner
from models.layers.norms import RmsNorm
from models.layers.ranks import Ranks
from models.layers.rotary import Rotations
from models.parts.injection import Injection


class SharedBlock(nn.Module):
    """The weights that all uses of a block share."""

    def __init__(self, part: Injection, hidden_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.norm = RmsNorm(2 * hidden_size, part.norm)
        self.attention = AttentionLayer(part.attention, hidden_size, ranks, inputs=2 * hidden_size)
        self.mlp_norm = RmsNorm(hidden_size, part.norm)
        self.mlp = MlpLayer(part.mlp, hidden_size, ranks)


class InjectionLayer(nn.Module):
    """One use of a shared block. State: `k` and `v`, see AttentionLayer."""

    def __init__(self, part: Injection, block: SharedBlock, hidden_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.block = block
        self.mlp_adapter = _adapter(hidden_size, part.adapter_rank, block.mlp.up.out_features)
        if part.attention_adapters:
            widths = block.attention.widths
            self.qkv_adapters = nn.ModuleList(_adapter(2 * hidden_size, part.adapter_rank, width) for width in widths)
        else:
            self.qkv_adapters = nn.ModuleList()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        embedded: torch.Tensor,
        batch: Batch,
        state: Mapping[str, torch.Tensor],
        rotations: Rotations,
    ) -> torch.Tensor:
        """x and embedded (T, hidden) to (T, hidden); writes this step's k and v into their pages."""
        block = self.block
        both = block.norm(torch.cat([x, embedded], dim=-1))
        projected = block.attention.qkv(both)
        if self.qkv_adapters:
            projected = projected + torch.cat([adapter(both) for adapter in self.qkv_adapters], dim=-1)
        y = block.mlp_norm(block.attention.attend(projected, batch, state, rotations))
        y = block.mlp.down(inner(block.mlp.up(y) + self.mlp_adapter(y), block.mlp.mlp))
        output: torch.Tensor = self.linear(y)
        return output


def _adapter(inputs: int, rank: int, outputs: int) -> nn.Sequential:
    """The first half is the same on every rank of a tensor-parallel worker."""
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False))
