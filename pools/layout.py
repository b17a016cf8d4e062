"""Where every state tensor lies in a worker's one block of pool memory. Pure arithmetic.

    [ page 0 | page 1 | … | page n-1 ][ slot 0 | slot 1 | … | slot m-1 ]

A *page record* holds `page_size` tokens of every paged tensor of every layer; a *slot record* holds one request's
fixed state of every layer. So a page or slot moves as one range, and neighbours merge into longer ones. Within a
record each tensor starts on an `ALIGNMENT` boundary, which keeps typed views and vector loads aligned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from pools.spec import DType, StateSpec

ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of one layer inside a record. `offset` is in bytes from the record's start."""

    layer: int
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor inside the record."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The fields of a page or a slot, and the bytes from one record to the next (0 when there is nothing to hold)."""

    fields: tuple[Field, ...]
    nbytes: int

    def field(self, layer: int, name: str) -> Field:
        """The field of `layer` called `name`. Raises KeyError when the model has no such state."""
        for field in self.fields:
            if field.layer == layer and field.name == name:
                return field
        raise KeyError(f"layer {layer} has no state tensor {name!r}")


def page_layout(spec: StateSpec, page_size: int) -> RecordLayout:
    """A page: for each layer and paged tensor, `(page_size, *shape)`."""
    return _record(
        (layer, tensor.name, (page_size, *tensor.shape), tensor.dtype)
        for group in spec.paged
        for layer in group.layers
        for tensor in group.tensors
    )


def slot_layout(spec: StateSpec) -> RecordLayout:
    """A slot: for each layer and slot tensor, `shape`."""
    return _record(
        (layer, tensor.name, tensor.shape, tensor.dtype)
        for group in spec.slots
        for layer in group.layers
        for tensor in group.tensors
    )


def _record(tensors: Iterable[tuple[int, str, tuple[int, ...], DType]]) -> RecordLayout:
    fields: list[Field] = []
    offset = 0
    for layer, name, shape, dtype in tensors:
        field = Field(layer, name, offset, shape, dtype)
        fields.append(field)
        offset = aligned(offset + field.nbytes)
    return RecordLayout(tuple(fields), offset)


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The whole block of pool memory of one worker: `num_pages` page records, then `num_slots` slot records."""

    spec: StateSpec
    page_size: int
    num_pages: int
    num_slots: int
    page: RecordLayout
    slot: RecordLayout

    @classmethod
    def of(cls, spec: StateSpec, *, page_size: int, num_pages: int, num_slots: int) -> PoolLayout:
        """Lay out pools of these sizes for a model with this state."""
        page, slot = page_layout(spec, page_size), slot_layout(spec)
        return cls(spec, page_size, num_pages, num_slots, page, slot)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole block."""
        return self.num_pages * self.page.nbytes + self.num_slots * self.slot.nbytes

    def page_offset(self, page: int) -> int:
        """Byte offset of page record `page`."""
        return page * self.page.nbytes

    def slot_offset(self, slot: int) -> int:
        """Byte offset of slot record `slot`."""
        return self.num_pages * self.page.nbytes + slot * self.slot.nbytes

    def record_at(self, offset: int) -> RecordAt:
        """The record in which a byte of the block lies."""
        slots = self.slot_offset(0)
        is_page = offset < slots
        record, base = (self.page, 0) if is_page else (self.slot, slots)
        number = (offset - base) // record.nbytes
        return RecordAt("page" if is_page else "slot", number, record, base + number * record.nbytes)


class RecordAt(NamedTuple):
    """Which record it is, how it is laid out, and at which offset of the block it begins."""

    kind: str
    number: int
    layout: RecordLayout
    start: int


def row_tables(*, num_rows: int, max_pages_per_request: int, slots_per_request: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the int32 tables that are indexed by row, by name: their first dimension is rows, never slots."""
    return {
        "page_table": (num_rows, max_pages_per_request),
        "row_to_slot": (num_rows,),
        "row_to_tracking_slots": (num_rows, max(slots_per_request - 1, 0)),
    }
