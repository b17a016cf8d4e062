"""A range as the plain stretches of bytes that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from transfer.plan import Range, Repeat


def stretches(item: Range) -> Iterator[tuple[int, int, int]]:
    """(source, target, bytes) of each, by the definition of a repeat and nothing else."""

    def walk(source: int, target: int, repeats: tuple[Repeat, ...]) -> Iterator[tuple[int, int, int]]:
        if not repeats:
            yield source, target, item.nbytes
            return
        first, *rest = repeats
        for number in range(first.times):
            yield from walk(source + number * first.source_step, target + number * first.target_step, tuple(rest))

    yield from walk(item.source, item.target, item.repeats)


def moved(source: np.ndarray, nbytes: int, ranges: Iterable[Range]) -> np.ndarray:
    """`nbytes` zeros, with what the ranges move from `source` in them, stretch by stretch."""
    block = np.zeros(nbytes, dtype=np.uint8)
    for start, there, length in (piece for item in ranges for piece in stretches(item)):
        block[there : there + length] = source[start : start + length]
    return block
