"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from models.parts.basics import Rope

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosine and sine: (T, 1, rotated / 2) each
Rotations = Mapping[Rope, Rotation]  # those of this step's positions


def rotation(rope: Rope, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation at `positions` (T,); angles are computed in float32."""
    frequencies = torch.tensor(rope.frequencies, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None, None] * frequencies
    return (angles.cos() * rope.magnitude).to(dtype), (angles.sin() * rope.magnitude).to(dtype)


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotate the first dimensions of every head of x: (T, heads, head_dim); the rest passes through."""
    cosine, sine = by
    half = cosine.shape[-1]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)
