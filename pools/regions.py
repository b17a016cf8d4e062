"""Pages and slots as stretches of pool memory: all that a transfer ever sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pools.layout import PoolLayout


@dataclass(frozen=True, slots=True)
class Region:
    """`length` bytes from `offset`, both counted in a worker's block of pool memory."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset + self.length


def page_regions(layout: PoolLayout, pages: Sequence[int]) -> list[Region]:
    """One region a page, in the order given. Raises IndexError for a page that the pool does not have."""
    _check("page", pages, layout.num_pages)
    return [Region(layout.page_offset(page), layout.page.nbytes) for page in pages]


def slot_regions(layout: PoolLayout, slots: Sequence[int]) -> list[Region]:
    """One region a slot, in the order given. Raises IndexError for a slot that the pool does not have."""
    _check("slot", slots, layout.num_slots)
    return [Region(layout.slot_offset(slot), layout.slot.nbytes) for slot in slots]


def merged(regions: Iterable[Region]) -> list[Region]:
    """The same bytes in the same order, with as few regions as that order allows; empty regions vanish.

    Nothing is sorted: the order of pages is the order of tokens.
    """
    result: list[Region] = []
    for region in regions:
        if region.length == 0:
            continue
        if result and result[-1].end == region.offset:
            result[-1] = Region(result[-1].offset, result[-1].length + region.length)
        else:
            result.append(region)
    return result


def _check(name: str, indexes: Sequence[int], count: int) -> None:
    for index in indexes:
        if not 0 <= index < count:
            raise IndexError(f"{name} {index} is not in a pool of {count}")
