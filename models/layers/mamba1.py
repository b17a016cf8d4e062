"""Mamba (Gu & Dao 2023, arXiv:2312.00752), as in Jamba and Falcon-Mamba.

A channel's state is a vector s (state). Each token lets it decay by the channel's time step, adds its input, and
reads, where B and C are shared by all channels and A is one negative number for each channel and state:

    s ← exp(Δ A) s + Δ x B;   y = s · C + D x

transformers' scan over several tokens takes no state to start from, so that there a prompt computed in chunks gives
other numbers than in one piece. Here it does not.
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
from models.parts.mamba1 import Mamba1

CHUNK = 64  # tokens that are computed together


class Mamba1Layer(nn.Module):
    """State: `conv`, see Convolution, and `ssm`, (slots, channels, state) float32."""

    def __init__(self, part: Mamba1, hidden_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.mamba = mamba = part.share(ranks.size)
        self.widths = [mamba.step_rank, mamba.state, mamba.state]
        self.input = nn.Linear(hidden_size, 2 * mamba.channels, bias=mamba.bias)
        self.conv = Convolution(mamba.channels, mamba.conv_width, bias=mamba.conv_bias)
        self.select = SumLinear(mamba.channels, sum(self.widths), bias=False, ranks=ranks)
        if mamba.norm:
            self.norms = nn.ModuleList(RmsNorm(width, mamba.norm) for width in self.widths)
        self.step = nn.Linear(mamba.step_rank, mamba.channels)
        self.log_rate = nn.Parameter(torch.empty(mamba.channels, mamba.state))
        self.skip = nn.Parameter(torch.empty(mamba.channels))
        self.out = SumLinear(mamba.channels, hidden_size, bias=mamba.bias, ranks=ranks)

    def forward(
        self, x: torch.Tensor, batch: Batch, state: Mapping[str, torch.Tensor], rotations: Rotations
    ) -> torch.Tensor:
        """(T, hidden) to (T, hidden); moves the states in their slots forward."""
        mixed, gate = self.input(x).chunk(2, dim=-1)
        inputs = self.conv(mixed, batch, state["conv"])
        parts = torch.split(self.select(inputs.to(x.dtype)), self.widths, dim=-1)
        if self.mamba.norm:
            parts = tuple(norm(part) for norm, part in zip(self.norms, parts, strict=True))
        step = F.softplus(F.linear(parts[0], self.step.weight).float() + self.step.bias.float())
        rates = -self.log_rate.float().exp()
        rest = (inputs * step, parts[1].float(), parts[2].float(), step)

        def one(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return scan_one(rates, *inputs)

        def many(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return scan_many(rates, *inputs)

        y = advance(rest, state["ssm"], batch, one=one, many=many)
        y = (y + inputs * self.skip.float()) * F.silu(gate.float())
        output: torch.Tensor = self.out(y.to(x.dtype))
        return output


def scan_one(
    rates: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, step: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each of B requests.

    rates (A): (D, N); x (times Δ), step (Δ): (B, D); b, c: (B, N); state: (B, D, N). Returns (B, D) without the skip,
    and the new states.
    """
    state = state * (step[..., None] * rates).exp() + x[..., None] * b[:, None]
    return (state @ c[..., None]).squeeze(-1), state


def scan_many(
    rates: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, step: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Successive tokens of one request, CHUNK at a time, by a parallel prefix scan (Hillis & Steele 1986).

    rates (A): (D, N); x (times Δ), step (Δ): (T, D); b, c: (T, N); state: (D, N). Returns (T, D) without the skip,
    and the new state. Only decays, which are at most 1, are ever multiplied, so nothing overflows.
    """
    outputs = []
    for begin in range(0, len(x), CHUNK):
        part = slice(begin, begin + CHUNK)
        decay = (step[part, :, None] * rates).exp()
        states = x[part, :, None] * b[part, None]
        states[0] += decay[0] * state
        reach = 1
        while reach < len(states):
            # Each token now knows of the last `reach` tokens; after this, of twice as many.
            states = torch.cat([states[:reach], states[reach:] + decay[reach:] * states[:-reach]])
            decay = torch.cat([decay[:reach], decay[reach:] * decay[:-reach]])
            reach *= 2
        outputs.append((states @ c[part, :, None]).squeeze(-1))
        state = states[-1]
    return torch.cat(outputs), state


def scan_reference(
    rates: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, step: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scan_many`, token by token and channel by channel, straight from the definition."""
    state, y = state.clone(), torch.empty_like(x)
    for token in range(len(x)):
        for channel in range(x.shape[1]):
            decay = (step[token, channel] * rates[channel]).exp()
            state[channel] = state[channel] * decay + x[token, channel] * b[token]
            y[token, channel] = state[channel] @ c[token]
    return y, state
