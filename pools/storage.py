"""The tensors behind the numbers: the one file of `pools` that knows torch.

One block of bytes holds all pages and slots (see `pools.layout`); models read and write it through typed, strided
views. The tables that are indexed by *row* (a request's place in the request pool) are sized by the number of rows,
never by the number of slots: `mamba_size` may be smaller than `num_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pools.layout import Field, PoolLayout, row_tables
from pools.plan import MemoryPlan
from pools.spec import DType

TORCH_DTYPE = {
    DType.FLOAT32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
    DType.INT32: torch.int32,
}


class Storage:
    """A worker's state memory.

    `block` is a uint8 tensor of exactly `layout.nbytes` bytes (shared memory, device memory, or None to allocate on
    the CPU). `max_pages_per_request` is the page table's width; `slots_per_request` is 0 for a model without slots.

    With `poison`, memory that nobody holds is filled with NaN, so that a read of freed or never written state shows
    in the output instead of passing by luck.
    """

    def __init__(
        self,
        layout: PoolLayout,
        *,
        num_rows: int,
        max_pages_per_request: int,
        slots_per_request: int = 1,
        block: torch.Tensor | None = None,
        poison: bool = False,
    ) -> None:
        if block is None:
            block = torch.zeros(layout.nbytes, dtype=torch.uint8)
        if block.dtype != torch.uint8 or block.numel() != layout.nbytes:
            raise ValueError(f"pool memory must be {layout.nbytes} bytes, not {block.numel()}")
        self.layout = layout
        self.block = block
        self.poison = poison
        # Indexed by row: (num_rows, …).
        tables = {
            name: torch.zeros(shape, dtype=torch.int32, device=block.device)
            for name, shape in row_tables(
                num_rows=num_rows,
                max_pages_per_request=max_pages_per_request,
                slots_per_request=slots_per_request,
            ).items()
        }
        self.page_table = tables["page_table"]
        self.row_to_slot = tables["row_to_slot"]
        self.row_to_tracking_slots = tables["row_to_tracking_slots"]
        self._paged = {
            (field.layer, field.name): self._view(field, 0, layout.num_pages, layout.page.nbytes)
            for field in layout.page.fields
        }
        self._slotted = {
            (field.layer, field.name): self._view(field, layout.slot_offset(0), layout.num_slots, layout.slot.nbytes)
            for field in layout.slot.fields
        }
        if poison:
            for view in (*self._paged.values(), *self._slotted.values()):
                view.fill_(torch.nan)

    @classmethod
    def from_plan(cls, plan: MemoryPlan, *, block: torch.Tensor | None = None, poison: bool = False) -> Storage:
        """Exactly the memory that `plan` charged for: `nbytes` is its `block_bytes + table_bytes`."""
        return cls(
            plan.layout,
            num_rows=plan.num_rows,
            max_pages_per_request=plan.max_pages_per_request,
            slots_per_request=plan.slots_per_request,
            block=block,
            poison=poison,
        )

    def _view(self, field: Field, start: int, count: int, record_bytes: int) -> torch.Tensor:
        """Records `start…` as one tensor of shape `(count, *field.shape)`, strided over whole records."""
        itemsize = field.dtype.itemsize
        strides = [1]
        for extent in reversed(field.shape[1:]):
            strides.insert(0, strides[0] * extent)
        typed = self.block.view(TORCH_DTYPE[field.dtype])
        return typed.as_strided(
            (count, *field.shape),
            (record_bytes // itemsize, *strides),
            # Counted from the start of the memory under the block, of which the block may be a later part.
            typed.storage_offset() + (start + field.offset) // itemsize,
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated: the block and the row-indexed tables."""
        tables = (self.page_table, self.row_to_slot, self.row_to_tracking_slots)
        return self.block.nbytes + sum(table.nbytes for table in tables)

    def paged(self, layer: int, name: str) -> torch.Tensor:
        """Tensor `name` of `layer` in every page: `(num_pages, page_size, *shape)`, a writable view."""
        return self._paged[layer, name]

    def slotted(self, layer: int, name: str) -> torch.Tensor:
        """Tensor `name` of `layer` in every slot: `(num_slots, *shape)`, a writable view."""
        return self._slotted[layer, name]

    def bind(self, row: int, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Write a lease into the row's tables: its pages in token order, its slot, its tracking slots."""
        self.page_table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        if slots:
            self.row_to_slot[row] = slots[0]
            self.row_to_tracking_slots[row] = torch.tensor(slots[1:], dtype=torch.int32)

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Zero the state in `slots`: every request's recurrent state starts at zero."""
        for view in self._slotted.values():
            view[list(slots)] = 0

    def wipe(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Called with memory that has just become free; fills it with NaN where `poison` is set."""
        if not self.poison:
            return
        for view in self._paged.values():
            view[list(pages)] = torch.nan
        for view in self._slotted.values():
            view[list(slots)] = torch.nan
