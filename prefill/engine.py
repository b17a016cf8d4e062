"""One prefill step: compute the next chunk of some prompts. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.batch import Chunk
from models.sampling import Sampled, sample
from pools.lease import Lease
from ranks.team import Team
from wire.messages import Sampling


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt's share of a step: tokens `start … start+count-1` of it, in the memory bound to `row`."""

    row: int
    prompt: tuple[int, ...]
    start: int
    count: int
    sampling: Sampling


class PrefillEngine:
    """Runs prompts on leased memory."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def begin(self, lease: Lease) -> None:
        """Before a request's first chunk: its row's tables, and recurrent state at zero."""
        self._team.bind(lease)
        self._team.clear(lease)

    def step(self, work: Sequence[Work]) -> dict[int, Sampled | None]:
        """Compute; returns the first tokens of the answers to prompts that have come to their end.

        By index in `work`. None where the model's output is not finite.
        """
        logits = self._team.forward(
            [Chunk(item.row, item.prompt[item.start : item.start + item.count], item.start) for item in work]
        )
        ends = [index for index, item in enumerate(work) if item.start + item.count == len(item.prompt)]
        first_tokens = sample(
            logits[ends], [work[index].sampling for index in ends], [len(work[index].prompt) for index in ends]
        )
        return dict(zip(ends, first_tokens, strict=True))
