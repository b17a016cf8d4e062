"""What a prefill worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """`chunk_size`: prompt tokens a step. `ask_ahead`: requests at the head of the queue that reserve on decode.

    `transfer` is a back end's name, or `auto`. `verify_transfers`: send a hash of every range that a hand-off moves.
    """

    name: str
    gateway: str
    chunk_size: int
    ask_ahead: int
    transfer: str
    verify_transfers: bool = False
