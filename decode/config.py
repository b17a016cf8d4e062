"""What a decode worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """`peer_endpoint` is where prefill workers dial in. `reuse`: keep pages for requests that begin with the same."""

    name: str
    gateway: str
    peer_endpoint: str
    reuse: bool = True
