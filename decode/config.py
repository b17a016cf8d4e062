"""What a decode worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass

from models.serving import ServingConfig


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """`peer_endpoint` is where prefill workers dial in; `data_endpoint` is where the tcp back end receives."""

    name: str
    serving: ServingConfig
    gateway: str
    peer_endpoint: str
    data_endpoint: str
    transfer: str
    run_directory: str
