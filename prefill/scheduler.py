"""Which prompts are computed in the next step, and how much of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def plan_step(remaining: Sequence[int], chunk_size: int) -> list[int]:
    """Tokens to compute now for each running prompt, in order of arrival; at most `chunk_size` over all.

    The oldest prompt gets all it can use, the next what is left: the first in is the first out, and short prompts
    share a step.
    """
    room = chunk_size
    tokens: list[int] = []
    for count in remaining:
        share = min(count, room)
        tokens.append(share)
        room -= share
    return tokens
