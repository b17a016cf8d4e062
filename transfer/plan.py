"""Which bytes go where: pairs of byte ranges from a source and a destination pool layout. Pure arithmetic.

Where both sides lay pages out alike a page is one range, and pages that are neighbours on both sides become one
longer range. Where page sizes or tensor-parallel sizes differ, a page's part of each kind of tensor is one gather: a
range that repeats in steps, over its tokens and over the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from pools.layout import PoolLayout
from pools.regions import merged, page_regions, slot_regions
from transfer.errors import OutOfLease
from transfer.reshard import Reshard


class Repeat(NamedTuple):
    """`times` times, each `source_step` and `target_step` bytes behind the one before."""

    times: int
    source_step: int
    target_step: int


class Range(NamedTuple):
    """`nbytes` bytes from offset `source` in one block of pool memory to offset `target` in the other.

    With `repeats`, a gather: all of that again in steps, the outermost first.
    """

    source: int
    target: int
    nbytes: int
    repeats: tuple[Repeat, ...] = ()

    @property
    def total(self) -> int:
        """Bytes that move in all."""
        return self.nbytes * prod(repeat.times for repeat in self.repeats)

    @property
    def source_steps(self) -> Steps:
        """How it repeats in the source block."""
        return tuple((repeat.times, repeat.source_step) for repeat in self.repeats)

    @property
    def target_steps(self) -> Steps:
        """How it repeats in the target block."""
        return tuple((repeat.times, repeat.target_step) for repeat in self.repeats)


Steps = tuple[tuple[int, int], ...]
"""(count, step in bytes), the outermost first: one side of a range's repeats."""


def plan_tokens(
    reshard: Reshard, source_pages: Sequence[int], target_pages: Sequence[int], start: int, stop: int
) -> list[Range]:
    """The ranges that move tokens `start … stop-1` of a request whose pages these are, in token order.

    Where pages are alike on both sides, `start` must begin one. Raises OutOfLease when the pages do not hold the
    tokens.
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
        _repeated(here + group.source_offset + cut.source, there + group.target_offset + cut.target, cut.nbytes,
                  Repeat(group.count, group.source_step, group.target_step))
        for group in reshard.slots
        for cut in group.cuts
    )  # fmt: skip


def _regroup(
    reshard: Reshard, source_pages: Sequence[int], target_pages: Sequence[int], start: int, stop: int
) -> Iterator[Range]:
    """Token runs that lie within one page on either side, one gather for each kind of tensor and cut."""
    source, target = reshard.source, reshard.target
    token = start
    while token < stop:
        here, here_at = divmod(token, source.page_size)
        there, there_at = divmod(token, target.page_size)
        run = min(stop - token, source.page_size - here_at, target.page_size - there_at)
        here_base, there_base = source.page_offset(source_pages[here]), target.page_offset(target_pages[there])
        for group in reshard.pages:
            ours = here_base + group.source_offset + here_at * group.source_nbytes
            theirs = there_base + group.target_offset + there_at * group.target_nbytes
            layers = Repeat(group.count, group.source_step, group.target_step)
            if group.whole:
                yield _repeated(ours, theirs, run * group.source_nbytes, layers)
                continue
            tokens = Repeat(run, group.source_nbytes, group.target_nbytes)
            for cut in group.cuts:
                yield _repeated(ours + cut.source, theirs + cut.target, cut.nbytes, layers, tokens)
        token += run


def _repeated(source: int, target: int, nbytes: int, *repeats: Repeat) -> Range:
    return Range(source, target, nbytes, tuple(repeat for repeat in repeats if repeat.times > 1))


def merge(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in fewer ranges: neighbours on both sides become one."""
    merged: list[Range] = []
    for item in ranges:
        if merged and not item.repeats:
            last = merged[-1]
            ends = (last.source + last.nbytes, last.target + last.nbytes)
            if not last.repeats and ends == (item.source, item.target):
                merged[-1] = Range(last.source, last.target, last.nbytes + item.nbytes)
                continue
        merged.append(item)
    return merged


def slices(ranges: Iterable[Range], limit: int) -> Iterator[list[Range]]:
    """The ranges in lists of at most `limit` bytes; long ones are cut, a gather over the limit has its own list."""
    found: list[Range] = []
    room = limit
    for item in ranges:
        for piece in _cut(item, room, limit):
            if found and piece.total > room:
                yield found
                found, room = [], limit
            found.append(piece)
            room -= piece.total
    if found:
        yield found


def _cut(item: Range, room: int, limit: int) -> Iterator[Range]:
    """A range in pieces: the first fills `room`, if there is some, the others are of `limit` bytes."""
    if item.repeats:
        yield item
        return
    done, step = 0, room if room > 0 else limit
    while done < item.nbytes:
        nbytes = min(item.nbytes - done, step)
        yield Range(item.source + done, item.target + done, nbytes)
        done, step = done + nbytes, limit


class LeasedMemory:
    """The byte ranges of a pool block that one attempt may be written to."""

    def __init__(self, layout: PoolLayout, pages: Sequence[int], slots: Sequence[int]) -> None:
        self._regions = merged([*page_regions(layout, sorted(pages)), *slot_regions(layout, sorted(slots))])

    def check(self, offset: int, nbytes: int, steps: Steps = ()) -> None:
        """Raises OutOfLease unless `offset … offset+nbytes-1`, repeated in steps, lies within one region of it."""
        if nbytes > 0 and all(count > 0 and step >= 0 for count, step in steps):
            end = offset + nbytes + sum((count - 1) * step for count, step in steps)
            if any(region.offset <= offset and end <= region.end for region in self._regions):
                return
        raise OutOfLease(f"{nbytes} bytes from {offset} on, in steps {steps}, are not in the memory of this lease")
