"""Proof that what lies in decode's pools is what prefill had in its own: a hash of every range that was moved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import xxhash

from pools.layout import PoolLayout, RecordLayout


class Digest(NamedTuple):
    """xxh3-64 of the `nbytes` bytes that belong at `offset` in decode rank `rank`'s block of pool memory."""

    rank: int
    offset: int
    nbytes: int
    xxh3: int


def hash_of(block: np.ndarray, offset: int, nbytes: int) -> int:
    """xxh3-64 of a stretch of pool memory (uint8)."""
    return xxhash.xxh3_64_intdigest(block[offset : offset + nbytes].data)


def damage(block: np.ndarray, layout: PoolLayout, digests: Iterable[Digest]) -> str | None:
    """What differs first, in words: which page or slot, layer and tensor it begins with. None when nothing does."""
    for digest in digests:
        if hash_of(block, digest.offset, digest.nbytes) != digest.xxh3:
            return f"{digest.nbytes} bytes from {place(layout, digest.offset)} on are not those that were sent"
    return None


def place(layout: PoolLayout, offset: int) -> str:
    """Where an offset in a block of pool memory lies."""
    slots = layout.slot_offset(0)
    kind, record, base = ("page", layout.page, 0) if offset < slots else ("slot", layout.slot, slots)
    number, within = divmod(offset - base, record.nbytes)
    return f"{kind} {number}, {_field(record, within)}"


def _field(record: RecordLayout, offset: int) -> str:
    """The last field that begins at or before this offset of its record; there is always a first at 0."""
    field = [field for field in record.fields if field.offset <= offset][-1]
    return f"layer {field.layer}, {field.name}"
