"""The gated feed-forward layer (SwiGLU; Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.architecture import Mlp


class MlpLayer(nn.Module):
    """down(silu(gate(x)) × up(x)), with gate and up in one matrix."""

    def __init__(self, mlp: Mlp, hidden_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * mlp.intermediate, bias=mlp.bias)
        self.down = nn.Linear(mlp.intermediate, hidden_size, bias=mlp.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden) to (T, hidden)."""
        y: torch.Tensor = self.down(gated(self.gate_up(x)))
        return y


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """[gate | up] (…, 2n) to silu(gate) × up (…, n)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
