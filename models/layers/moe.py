"""The mixture of experts: each token through its likeliest few (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.architecture import Moe
from models.layers.mlp import MlpLayer, gated


class MoeLayer(nn.Module):
    """A router, the experts' matrices, and the MLP that every token takes."""

    def __init__(self, moe: Moe, hidden_size: int) -> None:
        super().__init__()
        self.moe = moe
        self.router = nn.Linear(hidden_size, moe.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(moe.experts, 2 * moe.intermediate, hidden_size))
        self.down = nn.Parameter(torch.empty(moe.experts, hidden_size, moe.intermediate))
        self.shared = MlpLayer(moe.shared, hidden_size)
        if moe.shared_gate:
            self.shared_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden) to (T, hidden)."""
        weights, experts = route(self.router(x), self.moe.per_token, self.moe.renormalize)
        shared: torch.Tensor = self.shared(x)
        if self.moe.shared_gate:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return mix(x, weights, experts, self.gate_up, self.down) + shared


def route(logits: torch.Tensor, per_token: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits (T, E) to the weights and ids of each token's experts, both (T, per_token)."""
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(per_token)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts


def mix(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts: one pass over each expert that any token takes.

    x: (T, hidden); weights, experts: (T, per_token); gate_up: (E, 2n, hidden); down: (E, hidden, n).
    """
    per_token = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    tokens, scale = order // per_token, weights.flatten()[order][:, None]
    counts = experts.flatten().bincount(minlength=len(gate_up)).tolist()
    y = torch.zeros_like(x)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            mine = tokens[begin : begin + count]
            output = F.linear(gated(F.linear(x[mine], gate_up[expert])), down[expert])
            y.index_add_(0, mine, output * scale[begin : begin + count])
            begin += count
    return y


def mix_reference(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As `mix`, token by token."""
    y = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            y[token] += weight * (down[expert] @ gated(gate_up[expert] @ x[token]))
    return y
