"""What a colocated worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass

from models.serving import ServingConfig


@dataclass(frozen=True, slots=True)
class ColocatedConfig:
    """`chunk_size`: prompt tokens a step."""

    name: str
    serving: ServingConfig
    gateway: str
    chunk_size: int
