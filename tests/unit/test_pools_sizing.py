"""The sizing rules, one by one. Bytes are worked out by hand in `HYBRID_…`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pools.errors import PlanRefused
from pools.sizing import Phase, SizingRequest, plan_memory, readable
from pools.spec import StateSpec
from tests.pool_specs import HYBRID, LLAMA, RECURRENT

# Each tensor of each layer is padded to 64 bytes. A page of 4 tokens: k and v of 4·2·3·4 = 96 → 128, and of
# 4·1·5·2 = 40 → 64. A slot: twice conv 7·3·2 = 42 → 64 and state 5·3·2·4 = 120 → 128; once conv 5·3·2 = 30 → 64.
HYBRID_PAGE = 2 * 128 + 2 * 64
HYBRID_SLOT = 2 * (64 + 128) + 64

DECODE = SizingRequest(
    phase=Phase.DECODE,
    spec=HYBRID,
    max_context_tokens=40,
    memory_bytes=10**9,
    weights_bytes=1000,
    reserve_bytes=500,
    page_size=4,
    max_running_requests=8,
    pre_alloc_size=4,
)


@pytest.mark.parametrize(("phase", "rows"), [(Phase.DECODE, 12), (Phase.PREFILL, 8), (Phase.COLOCATED, 8)])
def test_only_decode_rows_include_the_pre_allocated(phase: Phase, rows: int) -> None:
    plan = plan_memory(replace(DECODE, phase=phase))
    assert (plan.num_rows, plan.max_running_requests, plan.pre_alloc_size) == (rows, 8, rows - 8)
    assert plan.num_slots == rows
    assert plan.warnings == ()


@pytest.mark.parametrize(("tracking", "slots"), [(0, 12), (1, 24), (2, 36)])
def test_every_row_gets_its_slots_when_no_size_is_given(tracking: int, slots: int) -> None:
    plan = plan_memory(replace(DECODE, tracking_slots=tracking))
    assert plan.slots_per_request == 1 + tracking
    assert plan.num_slots == slots
    assert plan.max_leases == 12


@pytest.mark.parametrize(("mamba_size", "leases"), [(3, 1), (10, 3), (11, 3), (35, 11)])
def test_smaller_mamba_size_is_honoured_and_the_plan_says_what_it_means(mamba_size: int, leases: int) -> None:
    plan = plan_memory(replace(DECODE, tracking_slots=2, mamba_size=mamba_size))
    assert plan.num_slots == mamba_size
    assert plan.num_rows == 12
    assert plan.max_running_requests == 8
    assert plan.max_leases == leases
    assert plan.warnings == ()
    expected = f"at most {leases} requests hold recurrent state at once ({mamba_size} slots, 3 a request)"
    assert any(limit.startswith(expected) for limit in plan.limits)


def test_mamba_size_equal_to_wanted_says_nothing() -> None:
    plan = plan_memory(replace(DECODE, mamba_size=12))
    assert plan.num_slots == 12
    assert plan.warnings == ()


@pytest.mark.parametrize(
    ("phase", "tracking", "wanted", "made_up"),
    [
        (Phase.DECODE, 0, 12, "(8 running + 4 pre-allocated) x 1 slot;"),
        (Phase.DECODE, 2, 36, "(8 running + 4 pre-allocated) x 3 slots;"),
        (Phase.PREFILL, 1, 16, "8 running x 2 slots;"),
        (Phase.COLOCATED, 0, 8, "8 running x 1 slot;"),
    ],
)
def test_larger_mamba_size_is_clamped_with_one_warning(
    phase: Phase, tracking: int, wanted: int, made_up: str
) -> None:
    plan = plan_memory(replace(DECODE, phase=phase, tracking_slots=tracking, mamba_size=100))
    assert plan.num_slots == wanted
    (warning,) = plan.warnings
    assert warning == f"--mamba-size 100 is more than the {wanted} wanted: {made_up} taking {wanted}"


def test_mamba_size_for_a_model_without_slots_is_clamped_to_none() -> None:
    plan = plan_memory(replace(DECODE, spec=LLAMA, mamba_size=100, tracking_slots=2))
    assert (plan.num_slots, plan.slots_per_request, plan.max_leases) == (0, 0, 12)
    (warning,) = plan.warnings
    assert "--mamba-size 100" in warning


def test_mamba_size_below_one_request_is_refused() -> None:
    with pytest.raises(PlanRefused, match=r"--mamba-size 2 is below the 3 slots .* at least 3, .* to get 36"):
        plan_memory(replace(DECODE, tracking_slots=2, mamba_size=2))
    with pytest.raises(PlanRefused, match="--mamba-size 0 is below the 1 slot "):
        plan_memory(replace(DECODE, mamba_size=0))


def test_pages_are_capped_by_what_leases_can_use() -> None:
    assert plan_memory(DECODE).num_pages == 12 * 10
    # Five requests hold state at once: no sixth could ever use a page.
    assert plan_memory(replace(DECODE, mamba_size=5)).num_pages == 5 * 10


def tables(rows: int, *, tracking: int = 0) -> int:
    """Bytes of the int32 tables: ten pages, one slot and the tracking slots for each row."""
    return rows * (10 + 1 + tracking) * 4


def test_pages_take_what_the_budget_leaves() -> None:
    fixed = 1000 + 500 + 12 * HYBRID_SLOT + tables(12)
    plan = plan_memory(replace(DECODE, memory_bytes=fixed + 121 * HYBRID_PAGE - HYBRID_PAGE // 2 - 64))
    assert plan.num_pages == 120
    assert plan.total_bytes == fixed + 120 * HYBRID_PAGE
    short = replace(DECODE, max_context_tokens=4000, memory_bytes=10**6)
    assert plan_memory(short).total_bytes > 10**6 - HYBRID_PAGE


# Context 40 is below the least that is worth a row, so every row must have its ten pages.
ROW_BYTES = HYBRID_SLOT + tables(1) + 10 * HYBRID_PAGE


@pytest.mark.parametrize(("rows", "running", "pre_alloc"), [(12, 8, 4), (11, 7, 4), (6, 4, 2), (2, 1, 1), (1, 1, 0)])
def test_rows_are_lowered_to_the_budget_in_proportion(rows: int, running: int, pre_alloc: int) -> None:
    for budget in (1500 + rows * ROW_BYTES, 1500 + (rows + 1) * ROW_BYTES - 1):
        plan = plan_memory(replace(DECODE, memory_bytes=budget))
        assert (plan.num_rows, plan.max_running_requests, plan.pre_alloc_size) == (rows, running, pre_alloc)
        assert plan.num_slots == rows
        assert plan.total_bytes <= budget
        if rows == 12:
            assert plan.warnings == ()
        else:
            (warning,) = plan.warnings
            assert f"holds {rows} of 12 rows" in warning
            assert f"--max-running-requests is lowered from 8 to {running}" in warning
            assert f"{1500 + 12 * ROW_BYTES} bytes" in warning


def test_given_mamba_size_is_applied_again_to_lowered_rows() -> None:
    plan = plan_memory(replace(DECODE, memory_bytes=1500 + 6 * ROW_BYTES, mamba_size=10))
    assert (plan.num_rows, plan.num_slots) == (6, 6)
    lowered, clamped = plan.warnings
    assert "holds 6 of 12 rows" in lowered
    assert clamped == "--mamba-size 10 is more than the 6 wanted: (4 running + 2 pre-allocated) x 1 slot; taking 6"
    small = plan_memory(replace(DECODE, memory_bytes=1500 + 6 * ROW_BYTES, mamba_size=5))
    assert small.num_slots == 5


def test_budget_below_one_request_is_refused_with_the_numbers() -> None:
    needed = 1500 + ROW_BYTES
    plan_memory(replace(DECODE, memory_bytes=needed))
    with pytest.raises(PlanRefused, match=rf"needs {needed} bytes .*Give at least 1 bytes more") as refused:
        plan_memory(replace(DECODE, memory_bytes=needed - 1))
    assert f"{needed - 1} bytes" in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "wrong"),
    [
        ("--page-size", {"page_size": 0}),
        ("--max-context", {"max_context_tokens": 0}),
        ("--max-running-requests", {"max_running_requests": 0}),
        ("--pre-alloc-size", {"pre_alloc_size": -1}),
        ("the number of tracking slots", {"tracking_slots": -1}),
        ("--mamba-size", {"mamba_size": -1}),
        ("--memory", {"memory_bytes": -1}),
        ("the size of the weights", {"weights_bytes": -1}),
        ("--reserve", {"reserve_bytes": -1}),
    ],
)
def test_impossible_numbers_are_refused_by_name(flag: str, wrong: dict[str, Any]) -> None:
    (value,) = wrong.values()
    with pytest.raises(PlanRefused, match=f"{flag} must be at least [01], not {value}"):
        plan_memory(replace(DECODE, **wrong))


@pytest.mark.parametrize(
    ("spec", "budget", "tokens"),
    [(HYBRID, 10**9, 4000), (RECURRENT, 10**9, 4000), (LLAMA, 2 * 1024 * 64, None), (HYBRID, 10**5, None)],
)
def test_longest_request(spec: StateSpec, budget: int, tokens: int | None) -> None:
    plan = plan_memory(replace(DECODE, spec=spec, max_context_tokens=4000, memory_bytes=budget))
    assert plan.max_request_tokens == (tokens or plan.num_pages * 4)
    assert plan.max_request_tokens <= 4000
    if tokens is None:
        assert f"a request has at most {plan.num_pages * 4} tokens, though the model allows 4000" in plan.limits


def test_plan_as_json_values() -> None:
    plan = plan_memory(replace(DECODE, mamba_size=100))
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["phase"] == "decode"
    assert values["num_slots"] == 12
    assert values["warnings"] == list(plan.warnings)
    assert values["total_bytes"] == 1500 + 12 * ROW_BYTES
    assert sum(tensor["bytes"] for tensor in values["tensors"]) == 12 * ROW_BYTES
    assert values["tensors"][0] == {
        "name": "full.k",
        "shape": [1, 120, 4, 2, 3],
        "dtype": "float32",
        "bytes": 120 * 128,
    }


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**19, "1.5 MiB"), (2**31, "2.0 GiB")]
)
def test_readable(nbytes: int, text: str) -> None:
    assert readable(nbytes) == text
