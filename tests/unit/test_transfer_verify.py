from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pools.layout import PoolLayout
from pools.spec import DType, PagedGroup, Segment, SlotGroup, StateSpec, TensorSpec
from transfer.verify import Digest, damage, hash_of, place

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


@given(st.data())
def test_any_flipped_bit_is_found_and_no_other_byte_matters(data: st.DataObject) -> None:
    block = np.random.default_rng(3).integers(0, 256, LAYOUT.nbytes, dtype=np.uint8)
    cuts = sorted(data.draw(st.sets(st.integers(0, LAYOUT.nbytes), min_size=4, max_size=8)))
    ranges = [(begin, end - begin) for begin, end in zip(cuts[::2], cuts[1::2], strict=False)]
    digests = [Digest(0, begin, nbytes, hash_of(block, begin, nbytes)) for begin, nbytes in ranges]
    assert damage(block, LAYOUT, digests) is None
    byte = data.draw(st.integers(0, LAYOUT.nbytes - 1))
    block[byte] ^= 1 << data.draw(st.integers(0, 7))
    hit = [(begin, nbytes) for begin, nbytes in ranges if begin <= byte < begin + nbytes]
    found = damage(block, LAYOUT, digests)
    if hit:
        (begin, nbytes) = hit[0]
        assert found == f"{nbytes} bytes from {place(LAYOUT, begin)} on are not those that were sent"
    else:
        assert found is None
