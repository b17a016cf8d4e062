"""What a worker's memory is planned from, and the plan: values only. `pools.sizing` decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pools.layout import PoolLayout
from pools.spec import DType, StateSpec

# Small pages waste little of a request's last page; below 16 tokens, page tables and transfer lists grow for no gain.
DEFAULT_PAGE_SIZE = 16
# Decode batches gain throughput up to about here on a CPU and lose latency beyond.
DEFAULT_MAX_RUNNING_REQUESTS = 32
# A hand-off lasts a few decode steps: landing places for a quarter of the batch keep it full.
DEFAULT_PRE_ALLOC_SIZE = 8
# Activations, logits and the allocator's own slack on a laptop-sized model; larger models want more.
DEFAULT_RESERVE_BYTES = 512 * 2**20


class Phase(Enum):
    """What the worker that is being sized does."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """What the user and the model ask for.

    `spec` is the state that this worker holds (one TP rank's share, if there are several). `memory_bytes` is the
    whole budget; `weights_bytes` and `reserve_bytes` (activations and the like) are taken from it first.
    `pre_alloc_size` counts decode rows for requests that land while all others run; other phases ignore it.
    `mamba_size` is the number of slots, None to have as many as can be used.
    """

    phase: Phase
    spec: StateSpec
    max_context_tokens: int
    memory_bytes: int
    weights_bytes: int
    reserve_bytes: int = DEFAULT_RESERVE_BYTES
    page_size: int = DEFAULT_PAGE_SIZE
    max_running_requests: int = DEFAULT_MAX_RUNNING_REQUESTS
    pre_alloc_size: int = DEFAULT_PRE_ALLOC_SIZE
    tracking_slots: int = 0
    mamba_size: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor, or one per layer under a common name (the first dimension is then the layers).

    `nbytes` includes the padding that aligns each layer's tensor inside its page or slot.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one worker, to be allocated exactly so.

    `max_leases`: requests that can hold their rows and slots at once. `max_request_tokens`: the longest prompt plus
    answer that the pages and the model allow. `limits` says in words what bounds concurrency.
    """

    request: SizingRequest
    layout: PoolLayout
    num_rows: int
    max_running_requests: int
    pre_alloc_size: int
    slots_per_request: int
    max_pages_per_request: int
    max_leases: int
    max_request_tokens: int
    tensors: tuple[PlannedTensor, ...]
    limits: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.request.page_size

    @property
    def num_pages(self) -> int:
        """Pages in the page pool."""
        return self.layout.num_pages

    @property
    def num_slots(self) -> int:
        """Slots in the slot pool: the effective mamba size."""
        return self.layout.num_slots

    @property
    def block_bytes(self) -> int:
        """Bytes of all pages and slots."""
        return self.layout.nbytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables that are indexed by row."""
        return sum(tensor.nbytes for tensor in self.tensors) - self.block_bytes

    @property
    def total_bytes(self) -> int:
        """Everything that is charged to the budget: never more than `request.memory_bytes`."""
        return self.request.weights_bytes + self.request.reserve_bytes + self.block_bytes + self.table_bytes

    def to_dict(self) -> dict[str, object]:
        """The plan as JSON-ready values: what was asked for, what was decided, every tensor."""
        asked = self.request
        return {
            "phase": asked.phase.value,
            "memory_bytes": asked.memory_bytes,
            "weights_bytes": asked.weights_bytes,
            "reserve_bytes": asked.reserve_bytes,
            "block_bytes": self.block_bytes,
            "table_bytes": self.table_bytes,
            "total_bytes": self.total_bytes,
            "page_size": asked.page_size,
            "max_context_tokens": asked.max_context_tokens,
            "num_rows": self.num_rows,
            "num_pages": self.num_pages,
            "num_slots": self.num_slots,
            "max_running_requests": self.max_running_requests,
            "pre_alloc_size": self.pre_alloc_size,
            "slots_per_request": self.slots_per_request,
            "max_pages_per_request": self.max_pages_per_request,
            "max_leases": self.max_leases,
            "max_request_tokens": self.max_request_tokens,
            "spec_digest": asked.spec.digest(),
            "tensors": [
                {
                    "name": tensor.name,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype.value,
                    "bytes": tensor.nbytes,
                }
                for tensor in self.tensors
            ],
            "limits": list(self.limits),
            "warnings": list(self.warnings),
        }
