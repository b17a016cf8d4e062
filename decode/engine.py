"""One decode step: the next token of every running request, in one batch. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.batch import Chunk
from models.sampling import Sampled, sample
from ranks.team import Team
from wire.messages import Sampling


@dataclass(frozen=True, slots=True)
class Work:
    """A request's share of a step: its newest token, of which `stored` tokens in the memory of `row` come before."""

    row: int
    last_token: int
    stored: int
    sampling: Sampling


class DecodeEngine:
    """Runs batches on leased memory."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def step(self, work: Sequence[Work]) -> list[Sampled | None]:
        """The next token of each; None where the model's output is not finite."""
        logits = self._team.forward([Chunk(item.row, (item.last_token,), item.stored) for item in work])
        return sample(logits, [item.sampling for item in work], [item.stored + 1 for item in work])
