"""Between two workers that may differ in tensor-parallel size and page size: which bytes of an entry go where.

An *entry* is one tensor of one token (paged) or of one request (slots). Each rank holds its share of every segment of
the sharded axis (`pools.spec.share`), laid end to end; so a rank pair exchanges the units that both hold, segment by
segment. Where several prefill ranks hold copies of a unit, exactly one of them sends it to each decode rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from pools.layout import PoolLayout
from pools.spec import Segment, StateSpec, TensorSpec, TpRank, share


class Cut(NamedTuple):
    """`nbytes` bytes from offset `source` in the source rank's entry to offset `target` in the target rank's."""

    source: int
    target: int
    nbytes: int


def cuts(tensor: TensorSpec, source: TpRank, target: TpRank) -> tuple[Cut, ...]:
    """What `source` must send of each entry of `tensor` (declared for the whole model) to `target`."""
    inner = prod(tensor.shape[tensor.axis + 1 :]) * tensor.dtype.itemsize
    local = [sum(_held(segment, rank) for segment in tensor.segments) for rank in (source, target)]
    found: list[Cut] = []
    for outer in range(prod(tensor.shape[: tensor.axis])):
        here, there = (outer * length for length in local)
        for segment in tensor.segments:
            for cut in _segment_cuts(segment, source, target):
                _append(found, Cut((here + cut.source) * inner, (there + cut.target) * inner, cut.nbytes * inner))
            here, there = here + _held(segment, source), there + _held(segment, target)
    return tuple(found)


def _held(segment: Segment, rank: TpRank) -> int:
    """Positions of the segment that a rank holds."""
    return len(share(segment.units, rank.rank, rank.size)) * segment.width


def _segment_cuts(segment: Segment, source: TpRank, target: TpRank) -> list[Cut]:
    """In positions along the axis, from the segment's start on either rank."""
    ours = share(segment.units, source.rank, source.size)
    theirs = share(segment.units, target.rank, target.size)
    first, stop = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    if first >= stop or (source.size > segment.units and source.rank != _sender(segment.units, source, target)):
        return []
    width = segment.width
    return [Cut((first - ours.start) * width, (first - theirs.start) * width, (stop - first) * width)]


def _sender(units: int, source: TpRank, target: TpRank) -> int:
    """Which of the source ranks with a copy of the one unit that `source` holds sends it to `target`.

    Copies of decode ranks take turns with copies of prefill ranks, so that equal sizes pair each rank with its like.
    """
    (unit,) = share(units, source.rank, source.size)
    copies, their_copies = source.size // units, max(target.size // units, 1)
    theirs = target.rank - unit * their_copies if target.size > units else 0
    return unit * copies + theirs * copies // their_copies


def _append(found: list[Cut], cut: Cut) -> None:
    """Join neighbours."""
    if found:
        last = found[-1]
        if (last.source + last.nbytes, last.target + last.nbytes) == (cut.source, cut.target):
            found[-1] = Cut(last.source, last.target, last.nbytes + cut.nbytes)
            return
    found.append(cut)


@dataclass(frozen=True, slots=True)
class FieldCuts:
    """Fields of a record that are cut alike, and the cuts of each of their entries. Sizes of an entry in bytes.

    The offsets are the first field's; `count` fields follow in steps of so many bytes.
    """

    source_offset: int
    target_offset: int
    source_nbytes: int
    target_nbytes: int
    cuts: tuple[Cut, ...]
    count: int = 1
    source_step: int = 0
    target_step: int = 0

    @property
    def whole(self) -> bool:
        """Whether entries move as they are, so that neighbouring entries form one range."""
        return self.source_nbytes == self.target_nbytes and self.cuts == (Cut(0, 0, self.source_nbytes),)

    def extended(self, field: FieldCuts) -> FieldCuts | None:
        """With one more field, if that is cut alike and lies where the next step leads."""
        if (field.source_nbytes, field.target_nbytes, field.cuts) != (
            self.source_nbytes,
            self.target_nbytes,
            self.cuts,
        ):
            return None
        last = self.count - 1
        source_step = field.source_offset - self.source_offset - last * self.source_step
        target_step = field.target_offset - self.target_offset - last * self.target_step
        if last and (source_step, target_step) != (self.source_step, self.target_step):
            return None
        return replace(self, count=self.count + 1, source_step=source_step, target_step=target_step)


def _grouped(fields: Iterable[FieldCuts]) -> tuple[FieldCuts, ...]:
    """As few groups as one pass finds: the layers' K make one, their V another."""
    groups: list[FieldCuts] = []
    for field in fields:
        for index, group in enumerate(groups):
            if extended := group.extended(field):
                groups[index] = extended
                break
        else:
            groups.append(field)
    return tuple(group for group in groups if group.cuts)


@dataclass(frozen=True, slots=True)
class Reshard:
    """How one prefill rank's pools map to one decode rank's.

    `pages` and `slots` hold what these two ranks exchange of a record. `same_pages`, `same_slots`: whole records,
    with the padding in them, move as they are.
    """

    source: PoolLayout
    target: PoolLayout
    pages: tuple[FieldCuts, ...]
    slots: tuple[FieldCuts, ...]
    same_pages: bool
    same_slots: bool

    @classmethod
    def between(
        cls,
        spec: StateSpec,
        source: PoolLayout,
        target: PoolLayout,
        source_rank: TpRank = TpRank(),  # noqa: B008
        target_rank: TpRank = TpRank(),  # noqa: B008
    ) -> Reshard:
        """`spec` is that of the whole model; the layouts are those of the two ranks."""

        def fields(groups: Iterable[tuple[tuple[int, ...], tuple[TensorSpec, ...]]]) -> list[tuple[Cut, ...]]:
            return [
                cuts(tensor, source_rank, target_rank)
                for layers, tensors in groups
                for _ in layers
                for tensor in tensors
            ]

        page_cuts = fields((group.layers, group.tensors) for group in spec.paged)
        slot_cuts = fields((group.layers, group.tensors) for group in spec.slots)
        pages = [
            FieldCuts(
                ours.offset, theirs.offset, ours.nbytes // source.page_size, theirs.nbytes // target.page_size, found
            )
            for ours, theirs, found in zip(source.page.fields, target.page.fields, page_cuts, strict=True)
        ]
        slots = [
            FieldCuts(ours.offset, theirs.offset, ours.nbytes, theirs.nbytes, found)
            for ours, theirs, found in zip(source.slot.fields, target.slot.fields, slot_cuts, strict=True)
        ]
        same = source.page_size == target.page_size and all(field.whole for field in pages)
        return cls(source, target, _grouped(pages), _grouped(slots), same, all(field.whole for field in slots))

    @property
    def empty(self) -> bool:
        """Whether these two ranks have nothing to exchange."""
        return not (self.pages or self.slots)
