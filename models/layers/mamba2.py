"""Mamba2 (Dao & Gu 2024, arXiv:2405.21060), as in Granite 4.

A head's state is a matrix S (head_dim, state). Each token lets S decay by its time step, adds its input, and reads:

    S ← exp(Δ A) S + Δ x Bᵀ;   y = S C + D x

A is one negative number per head; B and C are shared by the heads of a group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from models.batch import Batch
from models.layers.convolution import Convolution
from models.layers.norms import GroupedRmsNorm
from models.layers.ranks import Ranks, SumLinear
from models.layers.recurrence import advance
from models.layers.rotary import Rotations
from models.parts.mamba2 import Mamba2

CHUNK = 64  # tokens that are computed together


class Mamba2Layer(nn.Module):
    """State: `conv`, see Convolution, and `ssm`, (slots, heads, head_dim, state) float32."""

    def __init__(self, mamba: Mamba2, hidden_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.norm = (
            GroupedRmsNorm(mamba.channels, mamba.groups, mamba.heads, mamba.norm, ranks) if mamba.norm else None
        )
        self.mamba = mamba = mamba.share(ranks.size)
        self.widths = [mamba.channels, mamba.conv_channels, mamba.heads]
        self.input = nn.Linear(hidden_size, sum(self.widths), bias=mamba.input_bias)
        self.conv = Convolution(mamba.conv_channels, mamba.conv_width, bias=mamba.conv_bias)
        self.log_rate = nn.Parameter(torch.empty(mamba.heads))
        self.step_bias = nn.Parameter(torch.empty(mamba.heads))
        self.skip = nn.Parameter(torch.empty(mamba.heads))
        self.out = SumLinear(mamba.channels, hidden_size, bias=mamba.out_bias, ranks=ranks)

    def forward(
        self, x: torch.Tensor, batch: Batch, state: Mapping[str, torch.Tensor], rotations: Rotations
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden); moves the states in their slots forward."""
        mamba = self.mamba
        gate, mixed, step = self._project(x)
        inputs, b, c = self._heads(self.conv(mixed, batch, state["conv"]))
        step = F.softplus(step.float() + self.step_bias.float()).clamp(*mamba.step_limits)
        log_decay = -self.log_rate.float().exp() * step
        stepped = inputs * step[..., None]

        y = advance((stepped, b, c, log_decay), state["ssm"], batch, one=scan_one, many=scan_many)
        y = self._gated((y + inputs * self.skip.float()[:, None]).flatten(1), F.silu(gate.float()))
        output: torch.Tensor = self.out(y.to(x.dtype))
        return output

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate, [x | B | C] and time step, each multiplied by its constant."""
        mamba = self.mamba
        projected = self.input(x)
        if any(multiplier != 1.0 for multiplier in mamba.multipliers):
            shared = mamba.groups * mamba.state
            widths = [mamba.channels, mamba.channels, shared, shared, mamba.heads]
            parts = torch.split(projected, widths, dim=-1)
            projected = torch.cat([part * by for part, by in zip(parts, mamba.multipliers, strict=True)], dim=-1)
        gate, mixed, step = torch.split(projected, self.widths, dim=-1)
        return gate, mixed, step

    def _gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.norm is None:
            return y * gate
        normed: torch.Tensor = self.norm(y) * gate if self.mamba.norm_before_gate else self.norm(y * gate)
        return normed

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mamba, tokens = self.mamba, len(mixed)
        shared = mamba.groups * mamba.state
        x, b, c = torch.split(mixed, [mamba.channels, shared, shared], dim=-1)
        b, c = (part.reshape(tokens, mamba.groups, mamba.state) for part in (b, c))
        return x.reshape(tokens, mamba.heads, mamba.head_dim), b, c


def scan_one(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of B requests.

    x (times Δ): (B, H, P); b, c: (B, G, N); log_decay (Δ A): (B, H); state: (B, H, P, N). Returns (B, H, P) without
    the skip, and the new states.
    """
    group = x.shape[1] // b.shape[1]
    b, c = (part.repeat_interleave(group, dim=1) for part in (b, c))
    state = state * log_decay.exp()[..., None, None]
    state.add_(x.unsqueeze(-1) * b.unsqueeze(-2))
    return (state @ c.unsqueeze(-1)).squeeze(-1), state


def scan_many(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Successive tokens of one request, CHUNK at a time (the SSD algorithm of the paper's section 6).

    x (times Δ): (T, H, P); b, c: (T, G, N); log_decay (Δ A): (T, H); state: (H, P, N). Returns (T, H, P) without the
    skip, and the new state.
    """
    tokens, heads, size = len(x), x.shape[1], min(CHUNK, len(x))
    group = heads // b.shape[1]
    x, b, c, log_decay = (_chunks(part, size) for part in (x, b, c, log_decay[..., None]))
    total = log_decay.cumsum(-2)  # (H, M, C, 1): decay since the chunk's start
    between = (total - total.transpose(-1, -2)).tril().exp().tril()  # decay from token j to token i ≥ j
    among = (c @ b.transpose(-1, -2)).repeat_interleave(group, dim=0) * between
    y = among @ x
    c = c.repeat_interleave(group, dim=0) * total.exp()
    b = b.repeat_interleave(group, dim=0) * (total[..., -1:, :] - total).exp()
    added = x.transpose(-1, -2) @ b
    kept = total[..., -1:, :].exp()

    for chunk in range(x.shape[1]):
        y[:, chunk] += c[:, chunk] @ state.transpose(-1, -2)
        state = state * kept[:, chunk] + added[:, chunk]
    return y.flatten(1, 2)[:, :tokens].transpose(0, 1), state


def scan_reference(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scan_many`, token by token and head by head, straight from the definition."""
    state, y = state.clone(), torch.empty_like(x)
    group = x.shape[1] // b.shape[1]
    for token in range(len(x)):
        for head in range(x.shape[1]):
            shared = head // group
            state[head] = state[head] * log_decay[token, head].exp() + torch.outer(x[token, head], b[token, shared])
            y[token, head] = state[head] @ c[token, shared]
    return y, state


def _chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """(T, H, d) to (H, M, size, d), with zeros behind the last token: they decay nothing and add nothing."""
    x = F.pad(x.transpose(0, 1), (0, 0, 0, -len(x) % size))
    return x.reshape(x.shape[0], -1, size, x.shape[-1])
