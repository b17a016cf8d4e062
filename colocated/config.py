"""What a colocated worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ColocatedConfig:
    """`chunk_size`: prompt tokens a step."""

    name: str
    gateway: str
    chunk_size: int
