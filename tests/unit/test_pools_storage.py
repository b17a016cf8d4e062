from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pools.layout import PoolLayout
from pools.plan import MemoryPlan
from pools.sizing import Phase, SizingRequest, plan_memory
from pools.spec import PagedGroup, SlotGroup, StateSpec
from pools.storage import TORCH_DTYPE, Storage
from tests.pool_specs import ALL, HYBRID, LLAMA, RECURRENT


def make_plan(spec: StateSpec, *, tracking_slots: int = 0, mamba_size: int | None = None) -> MemoryPlan:
    return plan_memory(
        SizingRequest(
            phase=Phase.DECODE,
            spec=spec,
            max_context_tokens=40,
            memory_bytes=10**7,
            weights_bytes=0,
            reserve_bytes=0,
            page_size=4,
            max_running_requests=5,
            pre_alloc_size=2,
            tracking_slots=tracking_slots,
            mamba_size=mamba_size,
        )
    )


def real_tensors(storage: Storage) -> list[torch.Tensor]:
    """Every tensor that owns memory, found by looking, not by asking."""
    return [value for value in vars(storage).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("mamba_size", [None, 4, 100])
@pytest.mark.parametrize("tracking_slots", [0, 2])
@pytest.mark.parametrize("name", ALL)
def test_allocated_bytes_equal_planned_bytes(name: str, tracking_slots: int, mamba_size: int | None) -> None:
    plan = make_plan(ALL[name], tracking_slots=tracking_slots, mamba_size=mamba_size)
    storage = Storage.from_plan(plan)
    planned = sum(tensor.nbytes for tensor in plan.tensors)
    assert sum(tensor.untyped_storage().nbytes() for tensor in real_tensors(storage)) == planned
    assert storage.nbytes == planned == plan.block_bytes + plan.table_bytes == plan.total_bytes


@pytest.mark.parametrize("name", ALL)
def test_planned_shapes_are_the_allocated_shapes(name: str) -> None:
    spec = ALL[name]
    plan = make_plan(spec, tracking_slots=2)
    storage = Storage.from_plan(plan)
    planned = {tensor.name: tensor for tensor in plan.tensors}
    groups: tuple[PagedGroup | SlotGroup, ...] = (*spec.paged, *spec.slots)
    for group in groups:
        views = storage.paged if group in spec.paged else storage.slotted
        for tensor in group.tensors:
            expected = planned.pop(f"{group.name}.{tensor.name}")
            assert expected.shape[0] == len(group.layers)
            for layer in group.layers:
                view = views(layer, tensor.name)
                assert view.shape == expected.shape[1:]
                assert view.dtype == TORCH_DTYPE[expected.dtype]
    for table, expected in planned.items():
        assert getattr(storage, table).shape == expected.shape
        assert getattr(storage, table).dtype == torch.int32
    assert len(planned) == 3


@pytest.mark.parametrize("mamba_size", [3, 4, 6])
def test_tables_have_a_row_for_every_request_though_slots_are_fewer(mamba_size: int) -> None:
    plan = make_plan(HYBRID, tracking_slots=2, mamba_size=mamba_size)
    storage = Storage.from_plan(plan)
    assert plan.num_slots == mamba_size < plan.num_rows == 7
    for table in (storage.page_table, storage.row_to_slot, storage.row_to_tracking_slots):
        assert table.shape[0] == 7
    storage.bind(6, pages=(9, 3), slots=(2, 0, 1))
    assert storage.page_table[6, :2].tolist() == [9, 3]
    assert storage.row_to_slot[6].item() == 2
    assert storage.row_to_tracking_slots[6].tolist() == [0, 1]
    assert not storage.row_to_slot[:6].any()


def test_tables_have_a_row_for_every_request_of_a_model_without_slots() -> None:
    storage = Storage.from_plan(make_plan(LLAMA))
    storage.bind(6, pages=(1,), slots=())
    assert storage.row_to_slot.shape == (7,)
    assert storage.row_to_tracking_slots.shape == (7, 0)


def test_tables_of_a_model_without_pages() -> None:
    storage = Storage.from_plan(make_plan(RECURRENT))
    storage.bind(6, pages=(), slots=(5,))
    assert storage.page_table.shape == (7, 0)
    assert storage.row_to_slot[6].item() == 5


def record_views(storage: Storage) -> Iterator[torch.Tensor]:
    """The view of each field in each page and slot."""
    layout = storage.layout
    for field in layout.page.fields:
        yield from storage.paged(field.layer, field.name)
    for field in layout.slot.fields:
        yield from storage.slotted(field.layer, field.name)


def test_views_keep_inside_a_block_that_is_part_of_a_larger_one() -> None:
    layout = PoolLayout.of(HYBRID, page_size=3, num_pages=4, num_slots=3)
    memory = torch.zeros(layout.nbytes + 128, dtype=torch.uint8)
    storage = Storage(layout, num_rows=1, max_pages_per_request=1, block=memory[64:-64])
    for view in record_views(storage):
        view.fill_(-1.0)
    assert not memory[:64].any()
    assert not memory[-64:].any()
    assert storage.block.any()


@pytest.mark.parametrize("nbytes", [0, 64])
def test_block_of_another_size_is_refused(nbytes: int) -> None:
    layout = PoolLayout.of(HYBRID, page_size=3, num_pages=4, num_slots=3)
    with pytest.raises(ValueError, match=f"must be {layout.nbytes} bytes, not {nbytes}"):
        Storage(layout, num_rows=1, max_pages_per_request=1, block=torch.zeros(nbytes, dtype=torch.uint8))


def test_clear_slots_clears_these_and_no_others() -> None:
    storage = Storage.from_plan(make_plan(HYBRID))
    for view in record_views(storage):
        view.fill_(1.0)
    storage.clear_slots((1, 4))
    for field in storage.layout.slot.fields:
        view = storage.slotted(field.layer, field.name)
        assert [bool(view[slot].any()) for slot in range(7)] == [True, False, True, True, False, True, True]
    assert all(storage.paged(field.layer, field.name).all() for field in storage.layout.page.fields)


def test_poison_fills_what_nobody_holds() -> None:
    storage = Storage.from_plan(make_plan(HYBRID), poison=True)
    assert all(view.isnan().all() for view in record_views(storage))
    for view in record_views(storage):
        view.fill_(1.0)
    storage.wipe((2,), (0,))
    for field in storage.layout.page.fields:
        nan = storage.paged(field.layer, field.name).isnan().flatten(1)
        assert nan[2].all()
        assert int(nan.any(1).sum()) == 1
    for field in storage.layout.slot.fields:
        nan = storage.slotted(field.layer, field.name).isnan().flatten(1)
        assert nan[0].all()
        assert int(nan.any(1).sum()) == 1


def test_wipe_does_nothing_without_poison() -> None:
    storage = Storage.from_plan(make_plan(HYBRID))
    storage.wipe((0,), (0,))
    assert not storage.block.any()
