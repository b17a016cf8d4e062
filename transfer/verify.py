"""Proof that what lies in decode's pools is what prefill had in its own: a hash of every field that was moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from pools.layout import PoolLayout
from transfer.copying import gathered, view
from transfer.plan import Range, Steps
from wire.messages import Digests


class Digest(NamedTuple):
    """xxh3-64 of bytes of one field of one page or slot, in decode rank `rank`'s block of pool memory.

    `nbytes` bytes at `offset`, and so `times` times in steps of `step` bytes.
    """

    rank: int
    offset: int
    nbytes: int
    times: int
    step: int
    xxh3: int


def digests_for(rank: int, numbers: Digests) -> list[Digest]:
    """Those of one rank, out of a message. Raises ValueError when the numbers do not form digests."""
    width = len(Digest._fields)
    if len(numbers) % width:
        raise ValueError(f"{len(numbers)} numbers are no digests of {width} each")
    return [Digest(*numbers[at : at + width]) for at in range(0, len(numbers), width) if numbers[at] == rank]


def digests_of(source: np.ndarray, target: PoolLayout, rank: int, ranges: Iterable[Range]) -> Digests:
    """Of what ranges move from `source` (uint8) to the pools of decode rank `rank`, laid out as `target`.

    Flat, as a message carries them.
    """
    found: list[int] = []
    for item in ranges:
        for piece in by_field(item, target):
            ((times, step),) = piece.target_steps or ((1, 0),)
            xxh3 = xxhash.xxh3_64_intdigest(gathered(source, piece).data)
            found += Digest(rank, piece.target, piece.nbytes, times, step, xxh3)
    return tuple(found)


def by_field(item: Range, target: PoolLayout) -> Iterator[Range]:
    """The range in pieces that each lie in one field (and the padding behind it), and repeat at most once."""
    if len(item.repeats) > 1 or (item.repeats and item.repeats[0].target_step > _longest_step(item, target)):
        outer, inner = item.repeats[0], item.repeats[1:]
        for number in range(outer.times):
            source, there = item.source + number * outer.source_step, item.target + number * outer.target_step
            yield from by_field(Range(source, there, item.nbytes, inner), target)
        return
    if item.repeats:
        yield item
        return
    done = 0
    while done < item.nbytes:
        nbytes = min(item.nbytes - done, _field_end(target, item.target + done) - item.target - done)
        yield Range(item.source + done, item.target + done, nbytes)
        done += nbytes


def _longest_step(item: Range, target: PoolLayout) -> int:
    """The longest step of a repeat over the entries of the field that the range begins in."""
    return _field_end(target, item.target) - item.target - item.nbytes


def _field_end(layout: PoolLayout, offset: int) -> int:
    """Where the next field begins behind this offset."""
    _, _, record, start = layout.record_at(offset)
    within = offset - start
    return start + next((field.offset for field in record.fields if field.offset > within), record.nbytes)


def damage(block: np.ndarray, layout: PoolLayout, rank: int, numbers: Digests) -> str | None:
    """What differs first on this rank, in words: page or slot, layer and tensor. None when nothing does."""
    try:
        for digest in digests_for(rank, numbers):
            steps: Steps = ((digest.times, digest.step),) if digest.times > 1 else ()
            here = np.ascontiguousarray(view(block, digest.offset, digest.nbytes, steps))
            if xxhash.xxh3_64_intdigest(here.data) != digest.xxh3:
                return f"{place(layout, digest.offset)} is not what was sent"
    except ValueError as error:
        return f"the hashes that came with it mean nothing here: {error}"
    return None


def place(layout: PoolLayout, offset: int) -> str:
    """Where an offset in a block of pool memory lies."""
    kind, number, record, start = layout.record_at(offset)
    # The last field that begins at or before this offset of its record; there is always a first at 0.
    field = [field for field in record.fields if field.offset <= offset - start][-1]
    return f"{kind} {number}, layer {field.layer}, {field.name}"
