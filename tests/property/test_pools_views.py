"""Views of different fields, pages and slots never share a byte, for any state spec."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pools.layout import PoolLayout
from pools.spec import DType, PagedGroup, Segment, SlotGroup, StateSpec, TensorSpec
from pools.storage import Storage

FLOATS = st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def state_specs(draw: st.DrawFn) -> StateSpec:
    layers = iter(range(100))

    def tensors(count: int) -> tuple[TensorSpec, ...]:
        result = []
        for index in range(count):
            shape, dtype = draw(SHAPES), draw(FLOATS)
            result.append(TensorSpec(f"t{index}", shape, dtype, 0, (Segment("all", shape[0]),)))
        return tuple(result)

    def group_layers() -> tuple[int, ...]:
        return tuple(next(layers) for _ in range(draw(st.integers(1, 3))))

    paged = [
        PagedGroup(f"p{index}", group_layers(), tensors(draw(st.integers(1, 3))))
        for index in range(draw(st.integers(0, 2)))
    ]
    slotted = [
        SlotGroup(f"s{index}", group_layers(), tensors(draw(st.integers(1, 3))))
        for index in range(draw(st.integers(0, 2)))
    ]
    return StateSpec(tuple(paged), tuple(slotted))


@given(state_specs(), st.integers(1, 9), st.integers(0, 4), st.integers(0, 4))
def test_views_never_overlap_and_cover_all_but_padding(
    spec: StateSpec, page_size: int, num_pages: int, num_slots: int
) -> None:  # fmt: skip
    layout = PoolLayout.of(spec, page_size=page_size, num_pages=num_pages, num_slots=num_slots)
    storage = Storage(layout, num_rows=1, max_pages_per_request=1)
    views = [storage.paged(field.layer, field.name) for field in layout.page.fields]
    views += [storage.slotted(field.layer, field.name) for field in layout.slot.fields]
    cells = [cell for view in views for cell in view]

    # Every cell gets its own run of small integers, which all three types hold exactly.
    written = []
    for number, cell in enumerate(cells):
        values = (torch.arange(cell.numel()) + 37 * number) % 251 + 1
        written.append(values.view(cell.shape).to(cell.dtype))
        cell.copy_(written[-1])
    for cell, values in zip(cells, written, strict=True):
        assert torch.equal(cell, values)

    # And by address: sorted, each begins at or behind the end of the one before, by less than the alignment.
    spans = sorted((cell.data_ptr() - storage.block.data_ptr(), cell.nbytes) for cell in cells)
    end = 0
    for start, nbytes in spans:
        assert start % 64 == 0
        assert end <= start < end + 64
        end = start + nbytes
    assert end <= layout.nbytes < end + 64
