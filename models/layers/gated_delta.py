"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), as in Qwen3-Next and Qwen3.5.

A head's state is a matrix S (key_dim, value_dim) that maps keys to values. Each token first lets S decay, then
replaces part of what S returns for its key by its value, then reads S with its query:

    S ← exp(g) S;   S ← S + k (β (v − kᵀ S))ᵀ;   y = qᵀ S

In the functions below q and k are float32, of unit length (q also times key_dim^-½) and repeated for value heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from models.batch import Batch
from models.layers.convolution import Convolution
from models.layers.norms import RmsNorm
from models.layers.ranks import Ranks, SumLinear
from models.layers.recurrence import advance
from models.layers.rotary import Rotations
from models.parts.gated_delta import GatedDelta

CHUNK = 64  # tokens that are solved together
NORM_EPS = 1e-6  # of the unit length of q and k: the reference kernels fix it


class GatedDeltaLayer(nn.Module):
    """State: `conv`, see Convolution, and `recurrent`, (slots, value_heads, key_dim, value_dim) float32."""

    def __init__(self, delta: GatedDelta, hidden_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.delta = delta = delta.share(ranks.size)
        heads, values = delta.value_heads, delta.value_heads * delta.value_dim
        self.widths = [delta.conv_channels, values, heads, heads]
        self.input = nn.Linear(hidden_size, sum(self.widths), bias=False)
        self.conv = Convolution(delta.conv_channels, delta.conv_width, bias=False)
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.norm = RmsNorm(delta.value_dim, delta.norm)
        self.out = SumLinear(values, hidden_size, bias=False, ranks=ranks)

    def forward(
        self, x: torch.Tensor, batch: Batch, state: Mapping[str, torch.Tensor], rotations: Rotations
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden); moves the states in their slots forward."""
        mixed, gate, write, step = torch.split(self.input(x), self.widths, dim=-1)
        q, k, v = self._heads(self.conv(mixed, batch, state["conv"]))
        write = write.float().sigmoid() * self.delta.write_scale
        log_decay = -self.log_rate.float().exp() * F.softplus(step.float() + self.step_bias.float())

        y = advance((q, k, v, log_decay, write), state["recurrent"], batch, one=delta_one, many=delta_many)
        y = self.norm(y) * F.silu(gate.float().view_as(y))
        output: torch.Tensor = self.out(y.flatten(1).to(x.dtype))
        return output

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        delta = self.delta
        keys = delta.key_heads * delta.key_dim
        q, k, v = torch.split(mixed, [keys, keys, delta.value_heads * delta.value_dim], dim=-1)
        q, k = (unit(part.reshape(len(mixed), delta.key_heads, delta.key_dim)) for part in (q, k))
        group = delta.value_heads // delta.key_heads
        q, k = (part.repeat_interleave(group, dim=1) for part in (q * delta.key_dim**-0.5, k))
        return q, k, v.reshape(len(mixed), delta.value_heads, delta.value_dim)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of unit length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def delta_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of B requests.

    q, k: (B, H, dk); v: (B, H, dv); log_decay (g) and write (β): (B, H); state: (B, H, dk, dv). Returns (B, H, dv)
    and the new states.
    """
    state = state * log_decay.exp()[..., None, None]
    change = (v - (k.unsqueeze(-2) @ state).squeeze(-2)) * write[..., None]
    state.add_(k.unsqueeze(-1) * change.unsqueeze(-2))
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def delta_many(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    write: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Successive tokens of one request, CHUNK at a time.

    q, k: (T, H, dk); v: (T, H, dv); log_decay, write: (T, H); state: (H, dk, dv). Returns (T, H, dv) and the new
    state.

    Within a chunk the changes written by its tokens depend on one another through a unit lower triangular system
    (the UT transform; Yang et al. 2024, arXiv:2406.06484), whose solution is linear in the state before the chunk:
    changes = own − seen @ S.
    """
    tokens, size = len(q), min(CHUNK, len(q))
    q, k, v, log_decay, write = (_chunks(part, size) for part in (q, k, v, log_decay[..., None], write[..., None]))
    total = log_decay.cumsum(-2)  # (H, N, C, 1): decay since the chunk's start
    between = (total - total.transpose(-1, -2)).tril().exp().tril()  # decay from token j to token i ≥ j
    system = (write * k) @ k.transpose(-1, -2) * between
    sides = torch.cat([write * v, write * k * total.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, seen = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    among = q @ k.transpose(-1, -2) * between
    q = q * total.exp()
    k = k * (total[..., -1:, :] - total).exp()
    kept = total[..., -1:, :].exp()

    y = torch.empty_like(v)
    for chunk in range(v.shape[1]):
        changes = own[:, chunk] - seen[:, chunk] @ state
        y[:, chunk] = q[:, chunk] @ state + among[:, chunk] @ changes
        state = state * kept[:, chunk] + k[:, chunk].transpose(-1, -2) @ changes
    return y.flatten(1, 2)[:, :tokens].transpose(0, 1), state


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
            memory = state[head] * log_decay[token, head].exp()
            memory = memory + torch.outer(key, write[token, head] * (v[token, head] - key @ memory))
            y[token, head] = q[token, head] @ memory
            state[head] = memory
    return y, state


def _chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """(T, H, d) to (H, N, size, d), with zeros behind the last token: they decay nothing and write nothing."""
    x = F.pad(x.transpose(0, 1), (0, 0, 0, -len(x) % size))
    return x.reshape(x.shape[0], -1, size, x.shape[-1])
