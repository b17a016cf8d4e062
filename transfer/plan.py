"""Which bytes go where: pairs of byte ranges from a source and a destination pool layout. Pure arithmetic.

Where both sides lay pages out alike a page is one range, and pages that are neighbours on both sides become one
longer range. Where page sizes or tensor-parallel sizes differ, tokens are regrouped field by field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pools.layout import PoolLayout
from pools.regions import merged, page_regions, slot_regions
from transfer.errors import OutOfLease
from transfer.reshard import Reshard


class Range(NamedTuple):
    """`nbytes` bytes from offset `source` in one block of pool memory to offset `target` in the other."""

    source: int
    target: int
    nbytes: int


def plan_tokens(
    reshard: Reshard, source_pages: Sequence[int], target_pages: Sequence[int], start: int, stop: int
) -> list[Range]:
    """The ranges that move tokens `start … stop-1` of a request whose pages these are, in token order.

    `start` must begin a page on the source side. Raises OutOfLease when the pages do not hold the tokens.
    """
    source, target = reshard.source, reshard.target
    if stop > len(source_pages) * source.page_size or stop > len(target_pages) * target.page_size:
        raise OutOfLease(
            f"{stop} tokens do not fit {len(source_pages)} pages of {source.page_size} here "
            f"and {len(target_pages)} of {target.page_size} there"
        )
    if reshard.same_pages:
        first, last = start // source.page_size, -(-stop // source.page_size)
        ranges: Iterator[Range] = (
            Range(source.page_offset(here), target.page_offset(there), source.page.nbytes)
            for here, there in zip(source_pages[first:last], target_pages[first:last], strict=True)
        )
    else:
        ranges = _regroup(reshard, source_pages, target_pages, start, stop)
    return merge(ranges)


def plan_slots(reshard: Reshard, source_slots: Sequence[int], target_slots: Sequence[int]) -> list[Range]:
    """The ranges that move a request's recurrent state: its first slot; tracking slots stay where they are."""
    if not reshard.slots:
        return []
    here, there = reshard.source.slot_offset(source_slots[0]), reshard.target.slot_offset(target_slots[0])
    if reshard.same_slots:
        return [Range(here, there, reshard.source.slot.nbytes)]
    return merge(
        Range(here + field.source_offset + cut.source, there + field.target_offset + cut.target, cut.nbytes)
        for field in reshard.slots
        for cut in field.cuts
    )


def _regroup(
    reshard: Reshard, source_pages: Sequence[int], target_pages: Sequence[int], start: int, stop: int
) -> Iterator[Range]:
    """Token runs that lie within one page on either side, field by field."""
    source, target = reshard.source, reshard.target
    token = start
    while token < stop:
        here, here_at = divmod(token, source.page_size)
        there, there_at = divmod(token, target.page_size)
        run = min(stop - token, source.page_size - here_at, target.page_size - there_at)
        here_base, there_base = source.page_offset(source_pages[here]), target.page_offset(target_pages[there])
        for field in reshard.pages:
            ours = here_base + field.source_offset + here_at * field.source_nbytes
            theirs = there_base + field.target_offset + there_at * field.target_nbytes
            if field.whole:
                yield Range(ours, theirs, run * field.source_nbytes)
                continue
            for number in range(run):
                for cut in field.cuts:
                    yield Range(
                        ours + number * field.source_nbytes + cut.source,
                        theirs + number * field.target_nbytes + cut.target,
                        cut.nbytes,
                    )
        token += run


def merge(ranges: Iterable[Range]) -> list[Range]:
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
