"""How much of everything a worker allocates: values in, one immutable `MemoryPlan` out, nothing allocated.

    memory budget = weights + reserve + slots + tables indexed by row + pages (+ what nobody can use)

The order of decisions:

1. *Rows* from the request counts, *slots* from the rows: `min(mamba_size, rows x slots_per_request)`.
2. Does the budget hold them, with pages for `MIN_TOKENS_PER_REQUEST` tokens of every request that can have a lease at
   once? If not, take the most rows that it does hold and count slots again; refuse when it does not hold one.
3. Pages from what is left, up to what leases could ever use.

Nothing is ever raised above what was asked for, and the sum never exceeds the budget.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import prod

from pools.errors import PlanRefused
from pools.layout import PoolLayout, aligned, page_layout, row_tables, slot_layout
from pools.plan import (
    DEFAULT_MAX_RUNNING_REQUESTS,
    DEFAULT_PAGE_SIZE,
    DEFAULT_PRE_ALLOC_SIZE,
    DEFAULT_RESERVE_BYTES,
    MemoryPlan,
    Phase,
    PlannedTensor,
    SizingRequest,
)
from pools.spec import DType, PagedGroup, SlotGroup, TensorSpec

# The one module to plan with; `pools.plan` is for those who only read a plan.
__all__ = [
    "DEFAULT_MAX_RUNNING_REQUESTS",
    "DEFAULT_PAGE_SIZE",
    "DEFAULT_PRE_ALLOC_SIZE",
    "DEFAULT_RESERVE_BYTES",
    "MIN_TOKENS_PER_REQUEST",
    "MemoryPlan",
    "Phase",
    "PlannedTensor",
    "SizingRequest",
    "plan_memory",
    "readable",
]

# Fewer pages than for this many tokens a request, and a worker has rows that it can hardly ever fill.
MIN_TOKENS_PER_REQUEST = 256


def plan_memory(request: SizingRequest) -> MemoryPlan:
    """Decide every size. Raises PlanRefused for sizes that cannot work, with the numbers and what to change."""
    _check(request)
    wanted = _counts(request, request.max_running_requests + _pre_alloc(request))
    available = request.memory_bytes - request.weights_bytes - request.reserve_bytes
    affordable = bisect_right(
        range(1, wanted.num_rows + 1), available, key=lambda rows: _least_bytes(request, _counts(request, rows))
    )
    if affordable == 0:
        raise PlanRefused(_refusal(request))
    counts = _counts(request, affordable)
    warnings = [_lowered(request, wanted, counts)] if counts != wanted else []
    if request.mamba_size is not None and request.mamba_size > counts.wanted_slots:
        warnings.append(_clamped(request, counts))
    layout = PoolLayout.of(
        request.spec,
        page_size=request.page_size,
        num_pages=_num_pages(request, counts, available),
        num_slots=counts.num_slots,
    )
    most_tokens = request.max_context_tokens
    if request.spec.paged:
        most_tokens = min(most_tokens, layout.num_pages * request.page_size)
    return MemoryPlan(
        request=request,
        layout=layout,
        num_rows=counts.num_rows,
        max_running_requests=counts.running,
        pre_alloc_size=counts.pre_allocated,
        slots_per_request=counts.slots_per_request,
        max_pages_per_request=_max_pages(request),
        max_leases=counts.max_leases,
        max_request_tokens=most_tokens,
        tensors=_tensors(request, layout, counts),
        limits=_limits(request, layout, counts),
        warnings=tuple(warnings),
    )


@dataclass(frozen=True, slots=True)
class _Counts:
    """Rows and slots, decided together; everything that is charged, allocated or admitted follows from them."""

    running: int
    pre_allocated: int
    slots_per_request: int
    num_slots: int

    @property
    def num_rows(self) -> int:
        return self.running + self.pre_allocated

    @property
    def wanted_slots(self) -> int:
        return self.num_rows * self.slots_per_request

    @property
    def max_leases(self) -> int:
        if self.slots_per_request == 0:
            return self.num_rows
        return min(self.num_rows, self.num_slots // self.slots_per_request)


def _counts(request: SizingRequest, num_rows: int) -> _Counts:
    """What `num_rows` rows hold: running and pre-allocated requests in the proportion asked for.

    At least one is running. Each number grows with `num_rows`, or stays.
    """
    wanted_rows = request.max_running_requests + _pre_alloc(request)
    running = max(1, num_rows * request.max_running_requests // wanted_rows)
    slots_per_request = _slots_per_request(request)
    wanted_slots = num_rows * slots_per_request
    num_slots = wanted_slots if request.mamba_size is None else min(request.mamba_size, wanted_slots)
    return _Counts(running, num_rows - running, slots_per_request, num_slots)


def _pre_alloc(request: SizingRequest) -> int:
    return request.pre_alloc_size if request.phase is Phase.DECODE else 0


def _slots_per_request(request: SizingRequest) -> int:
    return 1 + request.tracking_slots if request.spec.slots else 0


def _pages(request: SizingRequest, tokens: int) -> int:
    return -(-tokens // request.page_size) if request.spec.paged else 0


def _max_pages(request: SizingRequest) -> int:
    return _pages(request, request.max_context_tokens)


def _fixed_bytes(request: SizingRequest, counts: _Counts) -> int:
    """Bytes of slots and tables: all pool memory but the pages."""
    tables = sum(map(prod, _tables(request, counts).values())) * DType.INT32.itemsize
    return tables + counts.num_slots * slot_layout(request.spec).nbytes


def _least_bytes(request: SizingRequest, counts: _Counts) -> int:
    """The least pool memory that makes sense for `counts`. Grows with the rows, or stays."""
    pages = counts.max_leases * _pages(request, min(request.max_context_tokens, MIN_TOKENS_PER_REQUEST))
    return _fixed_bytes(request, counts) + pages * page_layout(request.spec, request.page_size).nbytes


def _num_pages(request: SizingRequest, counts: _Counts, available: int) -> int:
    """Pages that the rest of the budget holds, but no more than all leases together could ever use."""
    if not request.spec.paged:
        return 0
    rest = available - _fixed_bytes(request, counts)
    return min(rest // page_layout(request.spec, request.page_size).nbytes, counts.max_leases * _max_pages(request))


def _tables(request: SizingRequest, counts: _Counts) -> dict[str, tuple[int, ...]]:
    return row_tables(
        num_rows=counts.num_rows,
        max_pages_per_request=_max_pages(request),
        slots_per_request=counts.slots_per_request,
    )


def _tensors(request: SizingRequest, layout: PoolLayout, counts: _Counts) -> tuple[PlannedTensor, ...]:
    state = [
        _state_tensor(group, tensor, (layout.num_pages, layout.page_size, *tensor.shape))
        for group in request.spec.paged
        for tensor in group.tensors
    ] + [
        _state_tensor(group, tensor, (layout.num_slots, *tensor.shape))
        for group in request.spec.slots
        for tensor in group.tensors
    ]
    tables = [
        PlannedTensor(name, shape, DType.INT32, prod(shape) * DType.INT32.itemsize)
        for name, shape in _tables(request, counts).items()
    ]
    return (*state, *tables)


def _state_tensor(group: PagedGroup | SlotGroup, tensor: TensorSpec, shape: tuple[int, ...]) -> PlannedTensor:
    """One of the group's tensors, in all layers; `shape` is that of one layer, over all pages or slots."""
    records, *field = shape
    return PlannedTensor(
        name=f"{group.name}.{tensor.name}",
        shape=(len(group.layers), *shape),
        dtype=tensor.dtype,
        nbytes=len(group.layers) * records * aligned(prod(field) * tensor.dtype.itemsize),
    )


def _check(request: SizingRequest) -> None:
    """Refuse sizes that no budget could make work."""
    for name, value, least in (
        ("--page-size", request.page_size, 1),
        ("--max-context", request.max_context_tokens, 1),
        ("--max-running-requests", request.max_running_requests, 1),
        ("--pre-alloc-size", request.pre_alloc_size, 0),
        ("the number of tracking slots", request.tracking_slots, 0),
        ("--mamba-size", request.mamba_size or 0, 0),
        ("--memory", request.memory_bytes, 0),
        ("the size of the weights", request.weights_bytes, 0),
        ("--reserve", request.reserve_bytes, 0),
    ):
        if value < least:
            raise PlanRefused(f"{name} must be at least {least}, not {value}")
    needed = _slots_per_request(request)
    if request.mamba_size is not None and request.mamba_size < needed:
        wanted = _counts(request, request.max_running_requests + _pre_alloc(request)).wanted_slots
        raise PlanRefused(
            f"--mamba-size {request.mamba_size} is below the {_slots(needed)} that one request needs "
            f"(1 + {request.tracking_slots} tracking): give at least {needed}, or leave it out to get {wanted}"
        )


def _refusal(request: SizingRequest) -> str:
    counts = _counts(request, 1)
    fixed, pool = _fixed_bytes(request, counts), _least_bytes(request, counts)
    needed = request.weights_bytes + request.reserve_bytes + pool
    tokens = min(request.max_context_tokens, MIN_TOKENS_PER_REQUEST)
    return (
        f"the memory budget of {_exactly(request.memory_bytes)} does not hold one request, which needs "
        f"{_exactly(needed)}: weights {request.weights_bytes} + reserve {request.reserve_bytes} + "
        f"slots and tables {fixed} + pages for {tokens} tokens {pool - fixed}. Give at least "
        f"{needed - request.memory_bytes} bytes more (--memory), or a smaller --reserve, --page-size or model"
    )


def _lowered(request: SizingRequest, wanted: _Counts, counts: _Counts) -> str:
    pre_alloc = ""
    if counts.pre_allocated != wanted.pre_allocated:
        pre_alloc = f" and --pre-alloc-size from {wanted.pre_allocated} to {counts.pre_allocated}"
    needed = request.weights_bytes + request.reserve_bytes + _least_bytes(request, wanted)
    return (
        f"the memory budget of {_exactly(request.memory_bytes)} holds {counts.num_rows} of {wanted.num_rows} rows: "
        f"--max-running-requests is lowered from {wanted.running} to {counts.running}{pre_alloc}; "
        f"all rows need {_exactly(needed)}"
    )


def _clamped(request: SizingRequest, counts: _Counts) -> str:
    rows = f"{counts.running} running"
    if request.phase is Phase.DECODE:
        rows = f"({rows} + {counts.pre_allocated} pre-allocated)"
    return (
        f"--mamba-size {request.mamba_size} is more than the {counts.wanted_slots} wanted: "
        f"{rows} x {_slots(counts.slots_per_request)}; taking {counts.num_slots}"
    )


def _limits(request: SizingRequest, layout: PoolLayout, counts: _Counts) -> tuple[str, ...]:
    limits = [f"at most {counts.running} requests run at once"]
    if counts.pre_allocated:
        limits[0] += f", and {counts.pre_allocated} more can land meanwhile ({counts.num_rows} rows)"
    if counts.num_slots < counts.wanted_slots:
        limits.append(
            f"at most {counts.max_leases} requests hold recurrent state at once "
            f"({layout.num_slots} slots, {counts.slots_per_request} a request); further ones wait"
        )
    if not request.spec.paged:
        return (
            *limits,
            f"no KV cache: a request has at most {request.max_context_tokens} tokens, as the model allows",
        )
    tokens = layout.num_pages * layout.page_size
    limits.append(f"the KV cache holds {tokens} tokens ({layout.num_pages} pages of {layout.page_size})")
    if tokens < request.max_context_tokens:
        limits.append(f"a request has at most {tokens} tokens, though the model allows {request.max_context_tokens}")
    elif (full := layout.num_pages // _max_pages(request)) < counts.max_leases:
        limits.append(f"{full} requests of {request.max_context_tokens} tokens fit at once, or more shorter ones")
    return tuple(limits)


def _slots(number: int) -> str:
    return f"{number} slot{'s' * (number != 1)}"


def _exactly(nbytes: int) -> str:
    return f"{nbytes} bytes ({readable(nbytes)})" if nbytes >= 1024 else f"{nbytes} bytes"


def readable(nbytes: int) -> str:
    """Bytes for people: `1.5 GiB`."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.1f} {unit}"
    return f"{nbytes} B"
