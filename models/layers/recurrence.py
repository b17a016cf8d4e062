"""Running a recurrence over a forward step: each request from its own state in its slot."""

from __future__ import annotations

from collections.abc import Callable

import torch

from models.batch import Batch

# Inputs, then the state before them; gives the outputs and the state after them.
Advance = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def advance(
    inputs: tuple[torch.Tensor, ...], state: torch.Tensor, batch: Batch, *, one: Advance, many: Advance
) -> torch.Tensor:
    """Outputs (T, …) for inputs (T, …); moves the slots of `state` (slots, …) forward.

    `one` takes one token of each of B requests and their states; `many` takes successive tokens of one request.
    """
    outputs = []
    if ones := batch.ones.count:
        slots = batch.ones.slots
        y, state[slots] = one(*(part[:ones] for part in inputs), state[slots])
        outputs.append(y)
    for chunk in batch.longer:
        y, state[chunk.slot] = many(*(part[chunk.begin : chunk.end] for part in inputs), state[chunk.slot])
        outputs.append(y)
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
