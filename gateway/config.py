"""What a gateway is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How often an attempt that was lost is followed by another, and how long a pair is waited for then."""

    retries: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`model_path` is a folder with tokenizer.json and config.json; no weights are read.

    `control_endpoint` is where workers dial in (`ipc://…` or `tcp://…`). Port 0 picks a free one. A worker that says
    nothing for `silence_s` is given up; it beats between its steps, and a step may take many seconds. `max_queue`
    bounds the requests that are open at once, each prompt of a batch counted. `api_key`: what clients must show as a
    bearer token, if anything.
    """

    model_path: Path
    served_model_name: str
    control_endpoint: str
    host: str = "127.0.0.1"
    port: int = 8000
    heartbeat_s: float = 1.0
    silence_s: float = 30.0
    request_timeout_s: float = 600.0
    max_queue: int = 1024
    max_body_bytes: int = 16 << 20
    stop_within_s: int = 2
    retries: int = 3
    patience_s: float = 60.0
    api_key: str | None = None

    @property
    def retry_limits(self) -> RetryLimits:
        """Of what an attempt that is lost leads to."""
        return RetryLimits(self.retries, self.patience_s)
