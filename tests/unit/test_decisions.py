"""The pure deciders of prefill and decode."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode.admission import join
from prefill.scheduler import plan_step

counts = st.integers(0, 50)


@given(st.lists(st.integers(1, 2000), max_size=12), st.integers(1, 600))
def test_a_step_is_filled_in_order(remaining: list[int], chunk_size: int) -> None:
    tokens = plan_step(remaining, chunk_size)
    assert len(tokens) == len(remaining)
    assert sum(tokens) == min(chunk_size, sum(remaining))
    assert all(0 <= share <= wanted for share, wanted in zip(tokens, remaining, strict=True))
    # Nobody gets anything while someone before still wants more.
    for index, share in enumerate(tokens):
        if share:
            assert tokens[:index] == remaining[:index]


@given(counts, counts, st.integers(1, 50))
def test_running_never_exceeds_its_cap(ready: int, running: int, cap: int) -> None:
    joining = join(ready, min(running, cap), cap)
    assert 0 <= joining <= ready
    assert min(running, cap) + joining <= cap
    assert joining == ready or min(running, cap) + joining == cap
