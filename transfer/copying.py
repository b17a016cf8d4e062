"""Ranges of pool memory as numpy arrays. Numpy copies them without holding the interpreter's lock."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from transfer.plan import Range, Steps


def view(block: np.ndarray, offset: int, nbytes: int, steps: Steps = ()) -> np.ndarray:
    """The bytes (uint8) from `offset` on, of shape `(*counts, nbytes)`. Raises ValueError outside the block.

    `block` is uint8, `(n,)` and contiguous; the view is of its memory.
    """
    if not steps:
        return block[offset : offset + nbytes]
    shape = (*(count for count, _ in steps), nbytes)
    strides = (*(step for _, step in steps), 1)
    return np.ndarray(shape, np.uint8, block.data, offset, strides)


def copy(source: np.ndarray, target: np.ndarray, ranges: Iterable[Range]) -> None:
    """Move the ranges from one block to another that this process can write."""
    for item in ranges:
        there = view(target, item.target, item.nbytes, item.target_steps)
        there[...] = view(source, item.source, item.nbytes, item.source_steps)


def gathered(source: np.ndarray, item: Range) -> np.ndarray:
    """What a range moves, as `(total,)` bytes: a view of the source where it is one stretch, a copy where not."""
    found = view(source, item.source, item.nbytes, item.source_steps)
    return found if found.ndim == 1 else np.ascontiguousarray(found).reshape(-1)
