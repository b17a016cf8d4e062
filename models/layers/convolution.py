"""The short causal convolution in front of a recurrence: each channel on its own, then usually silu.

A request keeps the newest `width - 1` inputs of every channel, oldest first; before its first token they are zero.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from models.batch import Batch
from models.layers.recurrence import advance


class Convolution(nn.Module):
    """State: (slots, channels, width - 1) in the activations' dtype."""

    def __init__(self, channels: int, width: int, bias: bool, activated: bool = True) -> None:
        super().__init__()
        self.activated = activated
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: torch.Tensor, batch: Batch, state: torch.Tensor) -> torch.Tensor:
        """(T, channels) to float32 of the same shape; moves the windows in `state` forward."""
        y = advance(
            (x,), state, batch, one=partial(convolve_one, self.weight), many=partial(convolve_many, self.weight)
        )
        y = y if self.bias is None else y + self.bias.float()
        return F.silu(y) if self.activated else y


def convolve_one(weight: torch.Tensor, x: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One input for each of B requests: weight (C, W), x (B, C), window (B, C, W - 1).

    Returns the output, float32 (B, C), and the next window.
    """
    inputs = torch.cat([window, x[:, :, None]], dim=-1)
    return (inputs.float() * weight.float()).sum(-1), inputs[:, :, 1:]


def convolve_many(weight: torch.Tensor, x: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Successive inputs of one request: weight (C, W), x (T, C), window (C, W - 1).

    Returns the outputs, float32 (T, C), and the next window.
    """
    inputs = torch.cat([window.T, x])
    wide, taps = inputs.float(), weight.float().T
    y = wide[: len(x)] * taps[0]
    for offset in range(1, len(taps)):
        y.addcmul_(wide[offset : offset + len(x)], taps[offset])
    return y, inputs[len(x) :].T


def convolution_reference(weight: torch.Tensor, x: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """As `convolve_many`, token by token and channel by channel. Returns the outputs only."""
    inputs = torch.cat([window.T, x])
    y = torch.empty_like(x)
    for token in range(len(x)):
        for channel in range(x.shape[1]):
            y[token, channel] = inputs[token : token + weight.shape[1], channel] @ weight[channel]
    return y
