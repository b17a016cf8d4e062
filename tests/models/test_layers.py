"""Fast forms of layers against the plain ones beside them, which follow the definitions token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.layers import gated_delta, kimi_delta, mamba1, mamba2
from models.layers.attention import attend_many, attend_one, attention_reference, hide
from models.layers.convolution import convolution_reference, convolve_many, convolve_one
from models.layers.moe import mix, mix_reference, route
from models.layers.norms import RmsNorm, rms_norm_reference
from models.parts.basics import Activation, Norm
from models.parts.feed_forward import Mlp, Router, Scoring

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("tokens", "context"), [(1, 1), (3, 3), (5, 30), (17, 64)])
def test_attention_over_a_chunk(tokens: int, context: int, window: int | None) -> None:
    q, keys, values = numbers(tokens, 6, 8), numbers(context, 2, 8, seed=1), numbers(context, 2, 8, seed=2)
    expected = attention_reference(q, keys, values, 0.3, window)
    close(attend_many(q, keys, values, 0.3, window), expected)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_attention_of_single_tokens_ignores_whatever_lies_behind(window: int | None) -> None:
    contexts, width = [1, 7, 24], 24
    q, keys, values = numbers(3, 6, 8), numbers(3, width, 2, 8, seed=1), numbers(3, width, 2, 8, seed=2)
    expected = [
        attention_reference(q[i : i + 1], keys[i, :n], values[i, :n], 0.3, window) for i, n in enumerate(contexts)
    ]
    unwritten = torch.arange(width) >= torch.tensor(contexts)[:, None]
    keys[unwritten], values[unwritten] = torch.nan, torch.nan
    close(attend_one(q, keys, values, hide(unwritten, window), 0.3), torch.cat(expected))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 20])
def test_convolution(width: int, tokens: int) -> None:
    weight, x, window = numbers(5, width), numbers(tokens, 5), numbers(5, width - 1, seed=1)
    expected = convolution_reference(weight, x, window)
    many, after = convolve_many(weight, x, window)
    close(many, expected)
    close(after, torch.cat([window, x.T], dim=1)[:, -(width - 1) :])
    for token in range(tokens):
        one, window = (part[0] for part in convolve_one(weight, x[token : token + 1], window[None]))
        close(one, expected[token])
    close(window, after)


def keys_and_queries(tokens: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return gated_delta.unit(numbers(tokens, heads, dim)) * dim**-0.5, gated_delta.unit(
        numbers(tokens, heads, dim, seed=3)
    )


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
def test_gated_delta_rule(tokens: int, strength: float) -> None:
    q, k = keys_and_queries(tokens, 3, 8)
    v, state = numbers(tokens, 3, 10), numbers(3, 8, 10)
    log_decay, write = -strength * numbers(tokens, 3).abs(), numbers(tokens, 3, seed=5).sigmoid() * 2
    inputs = (q, k, v, log_decay, write)
    expected, after = gated_delta.delta_reference(*inputs, state)
    for found, wanted in zip(gated_delta.delta_many(*inputs, state), (expected, after), strict=True):
        close(found, wanted)
    for token in range(tokens):
        y, batched = gated_delta.delta_one(*(part[token : token + 1] for part in inputs), state[None])
        close(y[0], expected[token])
        state = batched[0]
    close(state, after)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
def test_kimi_delta_rule(tokens: int, strength: float) -> None:
    """Strong decays as well: nothing may overflow."""
    q, k = keys_and_queries(tokens, 3, 8)
    v, state = numbers(tokens, 3, 8), numbers(3, 8, 8)
    log_decay, write = -strength * numbers(tokens, 3, 8).abs(), numbers(tokens, 3, seed=5).sigmoid()
    inputs = (q, k, v, log_decay, write)
    expected, after = kimi_delta.delta_reference(*inputs, state)
    for found, wanted in zip(kimi_delta.delta_many(*inputs, state), (expected, after), strict=True):
        close(found, wanted)
    for token in range(tokens):
        y, batched = kimi_delta.delta_one(*(part[token : token + 1] for part in inputs), state[None])
        close(y[0], expected[token])
        state = batched[0]
    close(state, after)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_scan(tokens: int, groups: int) -> None:
    x, b, c = numbers(tokens, 4, 6), numbers(tokens, groups, 5), numbers(tokens, groups, 5, seed=1)
    inputs = (x, b, c, -numbers(tokens, 4).abs())
    state = numbers(4, 6, 5)
    expected, after = mamba2.scan_reference(*inputs, state)
    for found, wanted in zip(mamba2.scan_many(*inputs, state), (expected, after), strict=True):
        close(found, wanted)
    for token in range(tokens):
        y, batched = mamba2.scan_one(*(part[token : token + 1] for part in inputs), state[None])
        close(y[0], expected[token])
        state = batched[0]
    close(state, after)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
def test_mamba1_scan(tokens: int, strength: float) -> None:
    rates, step = -numbers(7, 5).abs(), strength * numbers(tokens, 7).abs()
    inputs = (numbers(tokens, 7, seed=2), numbers(tokens, 5), numbers(tokens, 5, seed=1), step)
    state = numbers(7, 5, seed=4)
    expected, after = mamba1.scan_reference(rates, *inputs, state)
    for found, wanted in zip(mamba1.scan_many(rates, *inputs, state), (expected, after), strict=True):
        close(found, wanted)
    for token in range(tokens):
        y, batched = mamba1.scan_one(rates, *(part[token : token + 1] for part in inputs), state[None])
        close(y[0], expected[token])
        state = batched[0]
    close(state, after)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("gated", [True, False])
def test_experts_share_tokens_out_and_ranks_share_experts(activation: Activation, gated: bool) -> None:
    expert = Mlp(6, activation, gated=gated)
    up, down, x = numbers(4, 12 if gated else 6, 5), numbers(4, 5, 6), numbers(9, 5)
    weights, experts = route(numbers(9, 4, seed=7), Router(4, 2))
    expected = mix_reference(x, weights, experts, up, down, expert)
    close(mix(x, weights, experts, up, down, expert), expected)
    halves = [mix(x, weights, experts, up[i : i + 2], down[i : i + 2], expert, first=i) for i in (0, 2)]
    close(halves[0] + halves[1], expected)


routers = st.builds(
    lambda groups, of_group, **fields: Router(groups * of_group, groups=groups, **fields),
    st.sampled_from([1, 2, 4]),
    st.integers(2, 4),
    per_token=st.integers(1, 2),
    scoring=st.sampled_from(Scoring),
    renormalize=st.booleans(),
    scale=st.floats(0.5, 3),
)


@given(routers, st.booleans(), st.integers(0, 1000))
def test_routing_follows_its_definition(router: Router, biased: bool, seed: int) -> None:
    logits = numbers(1, router.experts, seed=seed)
    bias = numbers(router.experts, seed=seed + 1) if biased else None
    weights, experts = route(logits, router, bias)
    row = logits[0].tolist()
    total = sum(math.exp(logit) for logit in row)
    softmax = router.scoring is Scoring.SOFTMAX
    scores = [math.exp(logit) / total if softmax else 1 / (1 + math.exp(-logit)) for logit in row]
    choice = [score + (float(bias[i]) if bias is not None else 0.0) for i, score in enumerate(scores)]
    size = router.experts // router.groups
    worth = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(router.groups)]
    best = sorted(range(router.groups), key=lambda g: -worth[g])[: router.groups_taken]
    allowed = [i for i in range(router.experts) if router.groups == 1 or i // size in best]
    expected = sorted(allowed, key=lambda i: -choice[i])[: router.per_token]
    assert experts[0].tolist() == expected
    taken = [scores[i] for i in expected]
    divisor = sum(taken) if router.renormalize else 1.0
    assert weights[0].tolist() == pytest.approx([score / divisor * router.scale for score in taken], rel=1e-4)


@pytest.mark.parametrize(("offset", "weighted"), [(False, True), (True, True), (False, False)])
def test_rms_norm(offset: bool, weighted: bool) -> None:
    norm = RmsNorm(12, Norm(1e-3, unit_offset=offset, weighted=weighted))
    weight = torch.ones(12)
    if norm.weight is not None:
        norm.weight.data = numbers(12)
        weight = norm.weight.data + (1.0 if offset else 0.0)
    x = numbers(3, 4, 12)
    close(norm(x), rms_norm_reference(x, weight, 1e-3))
