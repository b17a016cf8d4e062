"""Feed-forward layers, gated (SwiGLU and its like; Shazeer 2020, arXiv:2002.05202) or plain."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.layers.ranks import Ranks, SumLinear
from models.parts.basics import Activation
from models.parts.feed_forward import Mlp


class MlpLayer(nn.Module):
    """down(act(gate(x)) × up(x)), with gate and up in one matrix, or down(act(up(x)))."""

    def __init__(self, mlp: Mlp, hidden_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.mlp = mlp = mlp.share(ranks.size)
        self.up = nn.Linear(hidden_size, mlp.intermediate * (2 if mlp.gated else 1), bias=mlp.bias)
        self.down = SumLinear(mlp.intermediate, hidden_size, bias=mlp.bias, ranks=ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden) to (T, hidden)."""
        y: torch.Tensor = self.down(inner(self.up(x), self.mlp))
        return y


def inner(x: torch.Tensor, mlp: Mlp) -> torch.Tensor:
    """[gate | up] (…, 2n) to act(gate_multiplier × gate) × up (…, n); up alone where not gated."""
    if not mlp.gated:
        return activate(x, mlp.activation)
    gate, up = x.chunk(2, dim=-1)
    if mlp.gate_multiplier != 1.0:
        gate = gate * mlp.gate_multiplier
    return activate(gate, mlp.activation) * up


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The nonlinearity, element by element."""
    match activation:
        case Activation.SILU:
            return F.silu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.RELU2:
            return F.relu(x).square()
