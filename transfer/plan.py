"""Which bytes go where: pairs of byte ranges from a source and a destination pool layout. Pure arithmetic.

Where both sides use the same page size a page is one range, and pages that are neighbours on both sides become one
longer range. Where page sizes differ, tokens are regrouped field by field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pools.layout import PoolLayout
from pools.regions import merged, page_regions, slot_regions
from transfer.errors import OutOfLease


class Range(NamedTuple):
    """`nbytes` bytes from offset `source` in one block of pool memory to offset `target` in the other."""

    source: int
    target: int
    nbytes: int


def plan_tokens(
    source: PoolLayout,
    target: PoolLayout,
    source_pages: Sequence[int],
    target_pages: Sequence[int],
    start: int,
    stop: int,
) -> list[Range]:
    """The ranges that move tokens `start … stop-1` of a request whose pages these are, in token order.

    `start` must begin a page on the source side. Raises OutOfLease when the pages do not hold the tokens.
    """
    if stop > len(source_pages) * source.page_size or stop > len(target_pages) * target.page_size:
        raise OutOfLease(
            f"{stop} tokens do not fit {len(source_pages)} pages of {source.page_size} here "
            f"and {len(target_pages)} of {target.page_size} there"
        )
    if source.page_size == target.page_size:
        first, last = start // source.page_size, -(-stop // source.page_size)
        ranges: Iterator[Range] = (
            Range(source.page_offset(here), target.page_offset(there), source.page.nbytes)
            for here, there in zip(source_pages[first:last], target_pages[first:last], strict=True)
        )
    else:
        ranges = _regroup(source, target, source_pages, target_pages, start, stop)
    return merge(ranges)


def plan_slots(
    source: PoolLayout, target: PoolLayout, source_slots: Sequence[int], target_slots: Sequence[int]
) -> list[Range]:
    """The ranges that move a request's recurrent state: its first slot; tracking slots stay where they are."""
    if not source.slot.nbytes:
        return []
    return [Range(source.slot_offset(source_slots[0]), target.slot_offset(target_slots[0]), source.slot.nbytes)]


def _regroup(
    source: PoolLayout,
    target: PoolLayout,
    source_pages: Sequence[int],
    target_pages: Sequence[int],
    start: int,
    stop: int,
) -> Iterator[Range]:
    """Token runs that lie within one page on either side, one range for each field."""
    token = start
    while token < stop:
        here, here_at = divmod(token, source.page_size)
        there, there_at = divmod(token, target.page_size)
        run = min(stop - token, source.page_size - here_at, target.page_size - there_at)
        here_base, there_base = (
            source.page_offset(source_pages[here]), target.page_offset(target_pages[there])
        )  # fmt: skip
        for ours, theirs in zip(source.page.fields, target.page.fields, strict=True):
            token_bytes = ours.nbytes // source.page_size
            yield Range(
                here_base + ours.offset + here_at * token_bytes,
                there_base + theirs.offset + there_at * token_bytes,
                run * token_bytes,
            )
        token += run


def merge(ranges: Iterator[Range] | Sequence[Range]) -> list[Range]:
    """The same bytes in fewer ranges: neighbours on both sides become one."""
    merged: list[Range] = []
    for item in ranges:
        if merged:
            last = merged[-1]
            if last.source + last.nbytes == item.source and last.target + last.nbytes == item.target:
                merged[-1] = Range(last.source, last.target, last.nbytes + item.nbytes)
                continue
        merged.append(item)
    return merged


class LeasedMemory:
    """The byte ranges of a pool block that one attempt may be written to."""

    def __init__(self, layout: PoolLayout, pages: Sequence[int], slots: Sequence[int]) -> None:
        self._regions = merged([*page_regions(layout, sorted(pages)), *slot_regions(layout, sorted(slots))])

    def check(self, offset: int, nbytes: int) -> None:
        """Raises OutOfLease unless `offset … offset+nbytes-1` lies wholly within the lease."""
        if nbytes > 0 and any(region.offset <= offset and offset + nbytes <= region.end for region in self._regions):
            return
        raise OutOfLease(f"bytes {offset} to {offset + nbytes} are not in the memory of this lease")
