"""Choosing tokens: by (seed, position) alone, out of the right tokens, as often as the model says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.sampling import sample, uniform


@dataclass(frozen=True)
class Choice:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


finite = st.floats(-30, 30, width=32)


@given(st.lists(finite, min_size=2, max_size=40), st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(0, 4))
def test_the_batch_does_not_matter(row: list[float], seed: int, position: int, others: int) -> None:
    alone = sample(logits_of(row), [Choice(seed=seed)], [position])
    batch = logits_of(*([row[::-1]] * others), row, row)
    choices = [Choice(seed=seed + 1)] * others + [Choice(seed=seed), Choice(temperature=0)]
    among = sample(batch, choices, [position + 7] * others + [position, position])
    assert among[others] == alone[0]
    assert row[among[-1].token_id] == max(row)


@given(st.lists(finite, min_size=3, max_size=30, unique=True), st.integers(0, 10**9), st.integers(1, 5))
def test_top_k_keeps_the_k_likeliest(row: list[float], seed: int, top_k: int) -> None:
    (sampled,) = sample(logits_of(row), [Choice(temperature=5.0, top_k=top_k, seed=seed)], [3])
    # Logits that lie closer than exp() can tell apart are equally likely.
    assert row[sampled.token_id] >= sorted(row, reverse=True)[min(top_k, len(row)) - 1] - 1e-6


@given(st.lists(finite, min_size=3, max_size=30, unique=True), st.integers(0, 10**9), st.floats(0.05, 1.0))
def test_top_p_keeps_the_smallest_set_that_reaches_p(row: list[float], seed: int, top_p: float) -> None:
    (sampled,) = sample(logits_of(row), [Choice(top_p=top_p, seed=seed)], [3])
    probabilities = torch.tensor(row, dtype=torch.float64).softmax(0)
    likelier = probabilities[probabilities > probabilities[sampled.token_id]].sum()
    assert likelier < top_p + 1e-6


def test_draws_are_as_frequent_as_their_probability() -> None:
    """A chi-square statistic over fixed draws: 5 degrees of freedom pass 20.5 once in a thousand."""
    probabilities = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
    row = [math.log(p) for p in probabilities]
    count = 4000
    choices = [Choice(seed=seed % 40) for seed in range(count)]
    drawn = sample(logits_of(*[row] * count), choices, [seed // 40 for seed in range(count)])
    frequencies = [sum(item.token_id == token for item in drawn) for token in range(len(row))]
    statistic = sum((f - count * p) ** 2 / (count * p) for f, p in zip(frequencies, probabilities, strict=True))
    assert statistic < 20.5
    halved = sample(
        logits_of(*[row] * count),
        [Choice(temperature=0.5, seed=seed % 40) for seed in range(count)],
        [seed // 40 for seed in range(count)],
    )
    squares = sum(p * p for p in probabilities)
    expected = probabilities[0] ** 2 / squares
    share = sum(item.token_id == 0 for item in halved) / count
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_the_uniform_number_belongs_to_seed_and_position(seed: int, position: int) -> None:
    number = uniform(seed, position)
    assert 0 <= number < 1
    assert number == uniform(seed, position)
    assert number != uniform(seed, position + 1)
    assert number != uniform(seed + 1, position)


def test_logprobs_are_the_models_own() -> None:
    row = [1.0, 3.0, 2.0, -1.0]
    expected = torch.tensor(row).log_softmax(0).tolist()
    cool, greedy, silent = sample(
        logits_of(row, row, row),
        [Choice(temperature=0.1, top_k=1, logprobs=3), Choice(temperature=0, logprobs=0), Choice(seed=4)],
        [1, 2, 3],
    )
    assert cool.token_id == 1
    assert cool.logprob == pytest.approx(expected[1])
    assert [token for token, _ in cool.top] == [1, 2, 0]
    assert [value for _, value in cool.top] == pytest.approx([expected[1], expected[2], expected[0]])
    assert (greedy.logprob, greedy.top) == (pytest.approx(expected[1]), ())
    assert (silent.logprob, silent.top) == (None, ())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_its_own_trouble_only(bad: float) -> None:
    first, second = sample(logits_of([1.0, bad], [0.0, 2.0]), [Choice(temperature=0), Choice(temperature=0)], [1, 1])
    assert first is None
    assert second is not None
    assert second.token_id == 1
