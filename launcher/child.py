"""What a process of the fleet is told by the launcher that starts it."""

from __future__ import annotations

from dataclasses import dataclass

from wire.messages import Incarnation


@dataclass(frozen=True, slots=True)
class Child:
    """One worker process: its name, where it belongs, and the pipes to the launcher, if one has started it."""

    name: str
    incarnation: Incarnation
    gateway: str
    lifeline_fd: int | None
    ready_fd: int | None
