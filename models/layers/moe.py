"""The mixture of experts: each token through its likeliest few (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from models.layers.mlp import MlpLayer, inner
from models.layers.ranks import Ranks
from models.parts.feed_forward import Mlp, Moe, Router, Scoring
from pools.spec import share


class MoeLayer(nn.Module):
    """A router, the matrices of this rank's experts, and the MLP that every token takes."""

    def __init__(self, moe: Moe, hidden_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.moe = moe
        self.ranks = ranks
        self.mine = share(moe.router.experts, ranks.rank, ranks.size)
        width, rows = moe.expert.intermediate, moe.expert.intermediate * (2 if moe.expert.gated else 1)
        self.router = nn.Linear(hidden_size, moe.router.experts, bias=False)
        if moe.router.choice_bias:
            self.choice_bias = nn.Parameter(torch.empty(moe.router.experts))
        inside = moe.latent or hidden_size
        self.up = nn.Parameter(torch.empty(len(self.mine), rows, inside))
        self.down = nn.Parameter(torch.empty(len(self.mine), inside, width))
        if moe.latent:
            self.latent_in = nn.Linear(hidden_size, moe.latent, bias=moe.latent_bias)
            self.latent_out = nn.Linear(moe.latent, hidden_size, bias=moe.latent_bias)
        if moe.shared:
            self.shared = MlpLayer(moe.shared, hidden_size, ranks)
        if moe.shared_gate:
            self.shared_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden) to (T, hidden)."""
        weights, experts = route(self.router(x), self.moe.router, getattr(self, "choice_bias", None))
        inside = self.latent_in(x) if self.moe.latent else x
        y = self.ranks.sum(mix(inside, weights, experts, self.up, self.down, self.moe.expert, self.mine.start))
        if self.moe.latent:
            y = self.latent_out(y)
        if self.moe.shared:
            shared: torch.Tensor = self.shared(x)
            y = y + (shared * torch.sigmoid(self.shared_gate(x)) if self.moe.shared_gate else shared)
        return y


def route(
    logits: torch.Tensor, router: Router, choice_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits (T, E) to the weights and ids of each token's experts, both (T, per_token)."""
    softmax = router.scoring is Scoring.SOFTMAX
    scores = logits.softmax(-1, dtype=torch.float32) if softmax else logits.float().sigmoid()
    choice = scores if choice_bias is None else scores + choice_bias.float()
    if router.groups > 1:
        grouped = choice.reshape(len(choice), router.groups, -1)
        worth = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1)
        taken = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(router.groups_taken).indices, True)
        choice = grouped.masked_fill(~taken[..., None], -torch.inf).flatten(-2)
    experts = choice.topk(router.per_token).indices
    weights = scores.gather(-1, experts)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + router.renormalize_eps)
    return (weights * router.scale).to(logits.dtype), experts


def mix(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    expert: Mlp,
    first: int = 0,
) -> torch.Tensor:
    """The weighted sum of each token's experts: one pass over each of ours that any token takes.

    x: (T, hidden); weights, experts: (T, per_token); up: (E, n or 2n, hidden); down: (E, hidden, n), the matrices of
    experts `first` to `first + E`.
    """
    per_token = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    tokens, scale = order // per_token, weights.flatten()[order][:, None]
    counts = experts.flatten().bincount(minlength=first + len(up)).tolist()
    y = torch.zeros_like(x)
    begin = sum(counts[:first])
    for index, count in enumerate(counts[first : first + len(up)]):
        if count:
            mine = tokens[begin : begin + count]
            output = F.linear(inner(F.linear(x[mine], up[index]), expert), down[index])
            y.index_add_(0, mine, output * scale[begin : begin + count])
            begin += count
    return y


def mix_reference(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, up: torch.Tensor, down: torch.Tensor, expert: Mlp
) -> torch.Tensor:
    """As `mix`, token by token."""
    y = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, index in zip(weights[token], experts[token], strict=True):
            y[token] += weight * (down[index] @ inner(up[index] @ x[token], expert))
    return y
