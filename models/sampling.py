"""From logits to tokens.

The draw for a token depends on its request's (seed, position) alone: one uniform number from a counter-based
generator (Philox; Salmon et al. 2011) goes through the inverse of the distribution's cumulative sum, in float64. So
the same request gives the same tokens in any batch, on any worker, in any replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


class SamplingChoice(Protocol):
    """How to choose a request's tokens.

    `temperature` 0 is greedy. `top_k` 0 is no limit. `logprobs` is how many alternatives to report with the token;
    None is no log-probabilities at all.
    """

    @property
    def temperature(self) -> float: ...  # noqa: D102
    @property
    def top_p(self) -> float: ...  # noqa: D102
    @property
    def top_k(self) -> int: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def logprobs(self) -> int | None: ...  # noqa: D102


NOT_FINITE = "the model's output is not finite (NaN or infinite) for this request"
"""What to say of a row without a token."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token, and where asked for its log-probability and the likeliest tokens, best first.

    Log-probabilities are those of the model: before temperature, top_k and top_p.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


def sample(logits: torch.Tensor, choices: Sequence[SamplingChoice], positions: Sequence[int]) -> list[Sampled | None]:
    """One token for each row of logits (B, vocab) float32. `positions[i]`: the absolute position of the new token.

    None for a row that is not finite: the model has computed nonsense for that request, and for no other.
    """
    finite: list[bool] = logits.isfinite().all(-1).tolist()
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, choice in enumerate(choices):
        if choice.temperature > 0 and finite[row]:
            tokens[row] = draw(logits[row].double().cpu().numpy(), choice, positions[row])
    reports = _reports(logits, choices, tokens)
    return [
        Sampled(token, *report) if sound else None
        for token, report, sound in zip(tokens, reports, finite, strict=True)
    ]


def draw(logits: np.ndarray, choice: SamplingChoice, position: int) -> int:
    """One token from float64 logits (vocab,): temperature, then top_k, then top_p, then the inverse CDF."""
    weights = np.exp((logits - logits.max()) / choice.temperature)
    if 0 < choice.top_k < len(weights):
        weights[_order(weights)[choice.top_k :]] = 0.0
    if choice.top_p < 1.0:
        order = _order(weights)
        before = np.cumsum(weights[order])
        # Keep tokens as long as those before them do not reach top_p, so that at least one stays.
        kept = 1 + np.searchsorted(before[:-1], choice.top_p * before[-1])
        weights[order[kept:]] = 0.0
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, uniform(choice.seed, position) * cumulative[-1], side="right"))


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) that belongs to (seed, position). The seed counts modulo 2⁶⁴."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


def _order(weights: np.ndarray) -> np.ndarray:
    """Token ids from the heaviest to the lightest; equal ones by id."""
    return np.argsort(-weights, kind="stable")


Report = tuple[float | None, tuple[tuple[int, float], ...]]


def _reports(logits: torch.Tensor, choices: Sequence[SamplingChoice], tokens: Sequence[int]) -> list[Report]:
    reports: list[Report] = [(None, ())] * len(choices)
    asked = [row for row, choice in enumerate(choices) if choice.logprobs is not None]
    if not asked:
        return reports
    logprobs = logits[asked].log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor([[tokens[row]] for row in asked], device=logits.device)).flatten()
    most = max(choices[row].logprobs or 0 for row in asked)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]))
    for row, logprob, row_ids, row_values in zip(asked, chosen.tolist(), ids.tolist(), values.tolist(), strict=True):
        count = choices[row].logprobs or 0
        reports[row] = logprob, tuple(zip(row_ids[:count], row_values[:count], strict=True))
    return reports
