from __future__ import annotations

import pytest

from pools.layout import PoolLayout
from pools.regions import Region, merged, page_regions, slot_regions
from tests.pool_specs import HYBRID, LLAMA

LAYOUT = PoolLayout.of(HYBRID, page_size=4, num_pages=5, num_slots=3)


def test_pages_come_before_slots() -> None:
    page, slot = LAYOUT.page.nbytes, LAYOUT.slot.nbytes
    assert page_regions(LAYOUT, (0, 4)) == [Region(0, page), Region(4 * page, page)]
    assert slot_regions(LAYOUT, (2,)) == [Region(5 * page + 2 * slot, slot)]
    assert slot_regions(LAYOUT, (2,))[0].end == LAYOUT.nbytes


def test_neighbours_merge_in_the_order_given() -> None:
    page = LAYOUT.page.nbytes
    assert merged(page_regions(LAYOUT, (1, 2, 3))) == [Region(page, 3 * page)]
    assert merged(page_regions(LAYOUT, (2, 3, 0, 1))) == [Region(2 * page, 2 * page), Region(0, 2 * page)]
    assert merged(page_regions(LAYOUT, (2, 1))) == page_regions(LAYOUT, (2, 1))


def test_last_page_and_first_slot_are_neighbours() -> None:
    both = [*page_regions(LAYOUT, (4,)), *slot_regions(LAYOUT, (0,))]
    assert merged(both) == [Region(4 * LAYOUT.page.nbytes, LAYOUT.page.nbytes + LAYOUT.slot.nbytes)]


def test_empty_regions_vanish() -> None:
    assert merged([Region(0, 0), Region(8, 4), Region(12, 0), Region(12, 4)]) == [Region(8, 8)]
    assert merged([]) == []


@pytest.mark.parametrize("index", [-1, 5])
def test_page_outside_the_pool(index: int) -> None:
    with pytest.raises(IndexError, match=f"page {index} is not in a pool of 5"):
        page_regions(LAYOUT, (0, index))


def test_slot_outside_the_pool() -> None:
    with pytest.raises(IndexError, match="slot 0 is not in a pool of 0"):
        slot_regions(PoolLayout.of(LLAMA, page_size=4, num_pages=5, num_slots=0), (0,))
