"""Kimi Delta Attention (Kimi Linear 2025, arXiv:2510.26692): the gated delta rule with a decay for each channel.

    S ← diag(exp(g)) S;   S ← S + k (β (v − kᵀ S))ᵀ;   y = qᵀ S

In the functions below q and k are float32, of unit length, and q also times dim^-½.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from models.batch import Batch
from models.layers.convolution import Convolution
from models.layers.gated_delta import unit
from models.layers.norms import RmsNorm
from models.layers.ranks import Ranks, SumLinear
from models.layers.recurrence import advance
from models.layers.rotary import Rotations
from models.parts.kimi_delta import KimiDelta

CHUNK = 16  # tokens that are solved together; the work within a chunk grows with its square times the channels


class KimiDeltaLayer(nn.Module):
    """State: `conv`, see Convolution, and `recurrent`, (slots, heads, dim, dim) float32."""

    def __init__(self, part: KimiDelta, hidden_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.delta = delta = part.share(ranks.size)
        channels = delta.channels
        self.input = nn.Linear(hidden_size, 3 * channels + delta.heads, bias=False)
        self.conv = Convolution(3 * channels, delta.conv_width, bias=False)
        self.forget = nn.ModuleList(_narrow(hidden_size, delta))
        self.gate = nn.ModuleList(_narrow(hidden_size, delta))
        self.log_rate = nn.Parameter(torch.empty(delta.heads))
        self.step_bias = nn.Parameter(torch.empty(channels))
        self.norm = RmsNorm(delta.dim, delta.norm)
        self.out = SumLinear(channels, hidden_size, bias=False, ranks=ranks)

    def forward(
        self, x: torch.Tensor, batch: Batch, state: Mapping[str, torch.Tensor], rotations: Rotations
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden); moves the states in their slots forward."""
        delta = self.delta
        mixed, write = torch.split(self.input(x), [3 * delta.channels, delta.heads], dim=-1)
        q, k, v = (self._heads(part) for part in self.conv(mixed, batch, state["conv"]).chunk(3, dim=-1))
        step = self._heads(F.softplus(self.forget[1](self.forget[0](x)).float() + self.step_bias.float()))
        log_decay = -self.log_rate.float().exp()[:, None] * step

        inputs = (unit(q) * delta.dim**-0.5, unit(k), v, log_decay, write.float().sigmoid())
        y = advance(inputs, state["recurrent"], batch, one=delta_one, many=delta_many)
        y = self.norm(y) * self._heads(self.gate[1](self.gate[0](x)).float()).sigmoid()
        output: torch.Tensor = self.out(y.flatten(1).to(x.dtype))
        return output

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), self.delta.heads, self.delta.dim)


def _narrow(hidden_size: int, delta: KimiDelta) -> list[nn.Linear]:
    """A projection through few channels. The first half is the same on every rank."""
    return [nn.Linear(hidden_size, delta.dim, bias=False), nn.Linear(delta.dim, delta.channels, bias=False)]


def delta_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of B requests.

    q, k, v, log_decay (g): (B, H, d); write (β): (B, H); state: (B, H, d, d). Returns (B, H, d) and the new states.
    """
    state = state * log_decay.exp()[..., None]
    change = (v - (k.unsqueeze(-2) @ state).squeeze(-2)) * write[..., None]
    state = state + k.unsqueeze(-1) * change.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def delta_many(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Successive tokens of one request, CHUNK at a time, as `models.layers.gated_delta.delta_many`.

    q, k, v, log_decay: (T, H, d); write: (T, H); state: (H, d, d). Returns (T, H, d) and the new state.

    Decays differ by channel, so that they do not come out of the products of keys as one factor. They are applied
    pair by pair, from token j to token i ≥ j: such a decay is at most 1, where a quotient of two could overflow.
    """
    outputs = []
    for begin in range(0, len(q), CHUNK):
        part = slice(begin, begin + CHUNK)
        mine = [x[part].transpose(0, 1) for x in (q, k, v, log_decay, write[..., None])]
        y, state = _solve(mine[0], mine[1], mine[2], mine[3], mine[4], state)
        outputs.append(y.transpose(0, 1))
    return torch.cat(outputs), state


def _solve(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk: q, k, v, log_decay (H, C, d); write (H, C, 1). Returns (H, C, d) and the new state."""
    total = log_decay.cumsum(-2)  # decay since the chunk's start
    later = torch.ones(len(total[0]), len(total[0]), dtype=torch.bool, device=q.device).tril()[..., None]
    between = (total[:, :, None] - total[:, None]).masked_fill(~later, -torch.inf).exp()  # (H, C, C, d)
    decayed = between * k[:, None]  # key j as token i sees it
    system = write * torch.einsum("hid,hijd->hij", k, decayed)
    since = total.exp()
    sides = write * (v - (k * since) @ state)
    changes = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    y = (q * since) @ state + torch.einsum("hid,hijd->hij", q, decayed) @ changes
    kept = (total[:, -1:] - total).exp()
    return y, state * since[:, -1, :, None] + (k * kept).transpose(-1, -2) @ changes


def delta_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `delta_many`, token by token and head by head, straight from the definition."""
    state, y = state.clone(), torch.empty_like(v)
    for token in range(len(q)):
        for head in range(q.shape[1]):
            key = k[token, head]
            memory = state[head] * log_decay[token, head].exp()[:, None]
            memory = memory + torch.outer(key, write[token, head] * (v[token, head] - key @ memory))
            y[token, head] = q[token, head] @ memory
            state[head] = memory
    return y, state
