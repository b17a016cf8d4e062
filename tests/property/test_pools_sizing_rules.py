"""The sizing rules hold for all sizes. What a plan should be is worked out here anew, row by row."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import assume, example, given
from hypothesis import strategies as st

from pools.errors import PlanRefused
from pools.plan import MemoryPlan
from pools.sizing import MIN_TOKENS_PER_REQUEST, Phase, SizingRequest, plan_memory
from pools.spec import StateSpec, TensorSpec
from pools.storage import Storage
from tests.pool_specs import ALL, HYBRID

REQUESTS = st.builds(
    SizingRequest,
    phase=st.sampled_from(Phase),
    spec=st.sampled_from(list(ALL.values())),
    max_context_tokens=st.integers(1, 600),
    memory_bytes=st.integers(0, 1_500_000),
    weights_bytes=st.integers(0, 2_000),
    reserve_bytes=st.integers(0, 2_000),
    page_size=st.integers(1, 33),
    max_running_requests=st.integers(1, 20),
    pre_alloc_size=st.integers(0, 10),
    tracking_slots=st.integers(0, 3),
    mamba_size=st.none() | st.integers(0, 12) | st.integers(0, 150),
)


def tried(request: SizingRequest) -> MemoryPlan | None:
    """The plan, or None when it is refused."""
    try:
        return plan_memory(request)
    except PlanRefused:
        return None


def planned(request: SizingRequest) -> MemoryPlan:
    """The plan; examples that have none are passed over."""
    plan = tried(request)
    assume(plan is not None)
    assert plan is not None
    return plan


def padded(tensor: TensorSpec, tokens: int = 1) -> int:
    elements = tokens
    for extent in tensor.shape:
        elements *= extent
    itemsize = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}[tensor.dtype.value]
    return (elements * itemsize + 63) // 64 * 64


def page_bytes(spec: StateSpec, page_size: int) -> int:
    return sum(len(group.layers) * padded(tensor, page_size) for group in spec.paged for tensor in group.tensors)


def slot_bytes(spec: StateSpec) -> int:
    return sum(len(group.layers) * padded(tensor) for group in spec.slots for tensor in group.tensors)


class Expected:
    """What the design asks for, given a number of rows."""

    def __init__(self, request: SizingRequest, rows: int) -> None:
        spec, page = request.spec, request.page_size
        self.slots_per_request = 1 + request.tracking_slots if spec.slots else 0
        self.wanted = rows * self.slots_per_request
        self.slots = self.wanted if request.mamba_size is None else min(request.mamba_size, self.wanted)
        self.leases = min(rows, self.slots // self.slots_per_request) if spec.slots else rows
        self.max_pages = len(range(0, request.max_context_tokens, page)) if spec.paged else 0
        table_width = self.max_pages + 1 + max(0, self.slots_per_request - 1)
        self.fixed = 4 * rows * table_width + self.slots * slot_bytes(spec)
        least_tokens = min(request.max_context_tokens, MIN_TOKENS_PER_REQUEST)
        least_pages = self.leases * len(range(0, least_tokens, page)) if spec.paged else 0
        self.least = self.fixed + least_pages * page_bytes(spec, page)


def wanted_rows(request: SizingRequest) -> int:
    return request.max_running_requests + (request.pre_alloc_size if request.phase is Phase.DECODE else 0)


@given(REQUESTS)
def test_plan_is_what_the_rules_say(request: SizingRequest) -> None:
    pool = request.memory_bytes - request.weights_bytes - request.reserve_bytes
    slots_per_request = Expected(request, 1).slots_per_request
    rows = max((n for n in range(1, wanted_rows(request) + 1) if Expected(request, n).least <= pool), default=0)
    possible = request.mamba_size is None or request.mamba_size >= slots_per_request
    plan = tried(request)
    if rows == 0 or not possible:
        assert plan is None
        return
    assert plan is not None
    expected = Expected(request, rows)
    assert plan.num_rows == rows
    assert plan.num_slots == expected.slots
    assert plan.max_leases == expected.leases
    assert plan.slots_per_request == expected.slots_per_request
    assert plan.max_pages_per_request == expected.max_pages
    if request.spec.paged:
        affordable = (pool - expected.fixed) // page_bytes(request.spec, request.page_size)
        assert plan.num_pages == min(affordable, expected.leases * expected.max_pages)
        assert plan.max_request_tokens == min(request.max_context_tokens, plan.num_pages * request.page_size)
    else:
        assert plan.num_pages == 0
        assert plan.max_request_tokens == request.max_context_tokens


@given(REQUESTS)
def test_plan_never_exceeds_the_budget_nor_what_was_asked(request: SizingRequest) -> None:
    plan = planned(request)
    charged = sum(tensor.nbytes for tensor in plan.tensors) + request.weights_bytes + request.reserve_bytes
    assert charged == plan.total_bytes <= request.memory_bytes
    assert 1 <= plan.max_running_requests <= request.max_running_requests
    assert 0 <= plan.pre_alloc_size <= (request.pre_alloc_size if request.phase is Phase.DECODE else 0)
    assert plan.max_running_requests + plan.pre_alloc_size == plan.num_rows
    assert plan.max_leases >= 1
    if request.mamba_size is not None:
        assert plan.num_slots <= request.mamba_size


@given(REQUESTS)
def test_one_warning_for_each_thing_that_was_lowered(request: SizingRequest) -> None:
    plan = planned(request)
    wanted = plan.num_rows * plan.slots_per_request
    clamped = [warning for warning in plan.warnings if "--mamba-size" in warning]
    lowered = [warning for warning in plan.warnings if "--max-running-requests" in warning]
    assert len(plan.warnings) == len(clamped) + len(lowered)
    if request.mamba_size is not None and request.mamba_size > wanted:
        (text,) = clamped
        numbers = {int(number) for number in re.findall(r"\d+", text)}
        assert {request.mamba_size, wanted, plan.max_running_requests, plan.slots_per_request} <= numbers
    else:
        assert clamped == []
    assert len(lowered) == (plan.num_rows < wanted_rows(request))


@given(REQUESTS, st.integers(1, 200_000))
def test_more_memory_never_means_fewer_requests(request: SizingRequest, more: int) -> None:
    plan = planned(request)
    richer = plan_memory(replace(request, memory_bytes=request.memory_bytes + more))
    assert richer.num_rows >= plan.num_rows
    assert richer.max_running_requests >= plan.max_running_requests
    assert richer.pre_alloc_size >= plan.pre_alloc_size
    assert richer.num_slots >= plan.num_slots
    if richer.num_rows == plan.num_rows:
        assert richer.num_pages >= plan.num_pages


@given(REQUESTS, st.integers(1, 20))
def test_a_larger_mamba_size_never_means_fewer_slots_where_rows_are_unchanged(
    request: SizingRequest, more: int
) -> None:  # fmt: skip
    assume(request.mamba_size is not None)
    assert request.mamba_size is not None
    plan, larger = planned(request), planned(replace(request, mamba_size=request.mamba_size + more))
    assert larger.num_rows <= plan.num_rows
    if larger.num_rows == plan.num_rows:
        assert larger.num_slots >= plan.num_slots
        assert larger.max_leases >= plan.max_leases


@given(REQUESTS)
def test_refusals_carry_the_numbers(request: SizingRequest) -> None:
    try:
        plan_memory(request)
    except PlanRefused as refused:
        numbers = {int(number) for number in re.findall(r"\d+", str(refused))}
        expected = Expected(request, 1)
        if request.mamba_size is not None and request.mamba_size < expected.slots_per_request:
            assert {request.mamba_size, expected.slots_per_request} <= numbers
        else:
            needed = expected.least + request.weights_bytes + request.reserve_bytes
            assert {needed, request.memory_bytes, needed - request.memory_bytes} <= numbers
            assert plan_memory(replace(request, memory_bytes=needed)).num_rows >= 1
    else:
        assume(False)


FEW_SLOTS = SizingRequest(
    phase=Phase.DECODE,
    spec=HYBRID,
    max_context_tokens=8,
    memory_bytes=10**6,
    weights_bytes=0,
    reserve_bytes=0,
    mamba_size=3,
    tracking_slots=1,
)


@given(REQUESTS)
@example(FEW_SLOTS)
def test_storage_is_the_plan_and_its_tables_have_every_row(request: SizingRequest) -> None:
    plan = planned(request)
    storage = Storage.from_plan(plan)
    assert storage.nbytes == sum(tensor.nbytes for tensor in plan.tensors)
    assert len(storage.page_table) == plan.num_rows
    assert len(storage.row_to_slot) == plan.num_rows
    assert len(storage.row_to_tracking_slots) == plan.num_rows
    last = plan.num_rows - 1
    pages = list(range(min(plan.max_pages_per_request, plan.num_pages)))[::-1]
    slots = list(range(plan.num_slots))[-plan.slots_per_request :] if plan.slots_per_request else []
    storage.bind(last, pages, slots)
    assert storage.page_table[last, : len(pages)].tolist() == pages
    assert [storage.row_to_slot[last].item(), *storage.row_to_tracking_slots[last].tolist()] == (slots or [0])
