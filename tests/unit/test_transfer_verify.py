from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pools.layout import PoolLayout
from pools.spec import DType, PagedGroup, Segment, SlotGroup, StateSpec, TensorSpec, TpRank
from tests.stretches import stretches
from transfer.copying import copy
from transfer.plan import Range, plan_slots, plan_tokens
from transfer.reshard import Reshard
from transfer.verify import damage, digests_for, digests_of, place

KV = tuple(TensorSpec(name, (2, 5), DType.BFLOAT16, 0, (Segment("heads", 2),)) for name in ("k", "v"))
CONV = TensorSpec("conv", (6, 3), DType.FLOAT32, 0, (Segment("x", 6),))
SPEC = StateSpec((PagedGroup("attention", (1, 4), KV),), (SlotGroup("short", (0, 2), (CONV,)),))
LAYOUT = PoolLayout.of(SPEC, page_size=3, num_pages=5, num_slots=2)


def test_every_field_is_named_from_its_first_byte_to_its_last() -> None:
    for page in range(LAYOUT.num_pages):
        for field in LAYOUT.page.fields:
            begin = LAYOUT.page_offset(page) + field.offset
            expected = f"page {page}, layer {field.layer}, {field.name}"
            assert {place(LAYOUT, begin), place(LAYOUT, begin + field.nbytes - 1)} == {expected}
    for slot in range(LAYOUT.num_slots):
        for field in LAYOUT.slot.fields:
            begin = LAYOUT.slot_offset(slot) + field.offset
            expected = f"slot {slot}, layer {field.layer}, {field.name}"
            assert {place(LAYOUT, begin), place(LAYOUT, begin + field.nbytes - 1)} == {expected}


@st.composite
def moved(draw: st.DrawFn) -> tuple[Reshard, list[Range]]:
    """Anything that a rank may be asked to move, between any two sizes."""
    here, there = draw(st.sampled_from([(0, 1), (1, 2), (0, 2)])), draw(st.sampled_from([(0, 1), (1, 2), (0, 2)]))
    page_sizes = st.sampled_from([2, 3, 4])
    layouts = [
        PoolLayout.of(SPEC.of_rank(*rank), page_size=draw(page_sizes), num_pages=7, num_slots=2)
        for rank in (here, there)
    ]
    reshard = Reshard.between(SPEC, *layouts, TpRank(*here), TpRank(*there))
    pages = [draw(st.permutations(range(7))) for _ in layouts]
    ranges = plan_tokens(reshard, pages[0], pages[1], 0, draw(st.integers(1, 14)))
    return reshard, [*ranges, *plan_slots(reshard, [1], [0])]


@given(moved(), st.data())
def test_any_flipped_bit_is_found_and_named_and_no_other_byte_matters(
    case: tuple[Reshard, list[Range]], data: st.DataObject
) -> None:
    reshard, ranges = case
    source = np.random.default_rng(3).integers(0, 256, reshard.source.nbytes, dtype=np.uint8)
    block = np.zeros(reshard.target.nbytes, dtype=np.uint8)
    copy(source, block, ranges)
    numbers = digests_of(source, reshard.target, 1, ranges)
    assert not digests_for(0, numbers)
    assert damage(block, reshard.target, 1, numbers) is None
    byte = data.draw(st.integers(0, reshard.target.nbytes - 1))
    block[byte] ^= 1 << data.draw(st.integers(0, 7))
    hit = any(there <= byte < there + nbytes for item in ranges for _, there, nbytes in stretches(item))
    found = damage(block, reshard.target, 1, numbers)
    assert found == (f"{place(reshard.target, byte)} is not what was sent" if hit else None)


def test_numbers_that_are_no_digests_count_as_damage() -> None:
    block = np.zeros(LAYOUT.nbytes, dtype=np.uint8)
    for numbers in ((0,) * 7, (0, LAYOUT.nbytes - 1, 10, 3, 50, 1), (0, 0, 8, 2**40, 2**40, 1)):
        assert "mean nothing" in str(damage(block, LAYOUT, 0, numbers))
