"""Which bytes move: destination bytes equal the source's, each token written once, nothing outside the lease."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pools.layout import PoolLayout
from pools.spec import DType
from tests.specs import hybrid_spec
from tests.stretches import stretches
from transfer.copying import copy, gathered
from transfer.errors import OutOfLease
from transfer.plan import LeasedMemory, Range, Repeat, merge, plan_slots, plan_tokens, slices
from transfer.reshard import Reshard

specs = st.builds(
    hybrid_spec,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([DType.FLOAT32, DType.BFLOAT16]),
    st.booleans(),
)


@st.composite
def handoffs(draw: st.DrawFn) -> tuple[PoolLayout, PoolLayout, list[int], list[int], list[int]]:
    """Source and target layouts, their pages, and the token counts after each chunk."""
    spec = draw(specs)
    page_sizes = st.sampled_from([1, 2, 3, 4, 8])
    sizes = draw(st.tuples(page_sizes, page_sizes))
    tokens = draw(st.integers(1, 40))
    layouts, pages = [], []
    for size in sizes:
        needed = -(-tokens // size)
        count = needed + draw(st.integers(0, 5))
        layouts.append(PoolLayout.of(spec, page_size=size, num_pages=count, num_slots=3))
        pages.append(draw(st.permutations(range(count)))[:needed])
    chunk = draw(st.integers(1, 17))
    stops = [*range(chunk, tokens, chunk), tokens]
    return layouts[0], layouts[1], pages[0], pages[1], stops


def token_bytes(block: np.ndarray, layout: PoolLayout, pages: list[int], token: int) -> bytes:
    """All of one token's state, read field by field: the oracle knows nothing of ranges."""
    page, at = divmod(token, layout.page_size)
    parts = []
    for field in layout.page.fields:
        size = field.nbytes // layout.page_size
        start = layout.page_offset(pages[page]) + field.offset + at * size
        parts.append(block[start : start + size].tobytes())
    return b"".join(parts)


@given(handoffs(), st.randoms(use_true_random=False))
def test_chunk_by_chunk_every_token_arrives(
    case: tuple[PoolLayout, PoolLayout, list[int], list[int], list[int]], random: object
) -> None:
    source, target, source_pages, target_pages, stops = case
    generator = np.random.default_rng(7)
    here = generator.integers(0, 256, source.nbytes, dtype=np.uint8)
    there = generator.integers(0, 256, target.nbytes, dtype=np.uint8)
    before = there.copy()
    lease = LeasedMemory(target, target_pages, [1] if target.slot.nbytes else [])
    written = np.zeros(target.nbytes, dtype=np.int64)
    sent = 0
    reshard = Reshard.between(source.spec, source, target)
    ranges: list[Range] = []
    for stop in stops:
        at_end = stop == stops[-1]
        upto = stop if at_end else stop - stop % source.page_size
        ranges += plan_tokens(reshard, source_pages, target_pages, sent, upto)
        sent = upto
    ranges += plan_slots(reshard, [2], [1])
    for item in ranges:
        lease.check(item.target, item.nbytes, item.target_steps)
        for ours, theirs, nbytes in stretches(item):
            assert ours >= 0
            assert ours + nbytes <= source.nbytes
            there[theirs : theirs + nbytes] = here[ours : ours + nbytes]
            written[theirs : theirs + nbytes] += 1
    copied = before.copy()
    copy(here, copied, ranges)
    assert (copied == there).all()
    assert written.max(initial=0) <= 1
    for token in range(stops[-1]):
        assert token_bytes(there, target, target_pages, token) == token_bytes(here, source, source_pages, token)
    size = source.slot.nbytes
    assert (
        there[target.slot_offset(1) : target.slot_offset(1) + size]
        == here[source.slot_offset(2) : source.slot_offset(2) + size]
    ).all()
    untouched = written == 0
    assert (there[untouched] == before[untouched]).all()


@given(handoffs())
def test_pages_that_do_not_hold_the_tokens_are_refused(
    case: tuple[PoolLayout, PoolLayout, list[int], list[int], list[int]],
) -> None:
    source, target, source_pages, target_pages, _ = case
    with pytest.raises(OutOfLease):
        plan_tokens(
            Reshard.between(source.spec, source, target), source_pages, target_pages, 0,
            len(target_pages) * target.page_size + 1,
        )  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 4)), max_size=12).map(
        lambda items: [Range(*item) for item in items]
    )
)
def test_merging_moves_the_same_bytes(ranges: list[Range]) -> None:
    merged = merge(ranges)
    assert pairs(merged) == pairs(ranges)
    assert len(merged) <= len(ranges)


def pairs(items: list[Range]) -> list[tuple[int, int]]:
    return [(ours + i, theirs + i) for item in items for ours, theirs, n in stretches(item) for i in range(n)]


repeats = st.builds(Repeat, st.integers(2, 3), st.integers(1, 9), st.integers(1, 9))
any_ranges = st.builds(
    Range, st.integers(0, 90), st.integers(0, 90), st.integers(1, 40), st.lists(repeats, max_size=2).map(tuple)
)


@given(st.lists(any_ranges, max_size=8), st.integers(1, 50))
def test_slices_move_the_same_bytes_in_pieces_of_the_size(ranges: list[Range], limit: int) -> None:
    found = list(slices(ranges, limit))
    assert pairs([item for piece in found for item in piece]) == pairs(ranges)
    for piece in found:
        assert piece
        alone = len(piece) == 1 and piece[0].repeats
        assert alone or sum(item.total for item in piece) <= limit


@given(any_ranges)
def test_what_is_gathered_is_what_moves(item: Range) -> None:
    block = np.random.default_rng(2).integers(0, 256, 200, dtype=np.uint8)
    expected = np.concatenate([block[ours : ours + n] for ours, _, n in stretches(item)])
    assert (gathered(block, item) == expected).all()
    assert item.total == len(expected)


@given(
    st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=5),
    st.integers(-50, 2000),
    st.integers(-1, 600),
    st.lists(st.tuples(st.integers(-1, 3), st.integers(-40, 300)), max_size=2).map(tuple),
)
def test_a_lease_is_exactly_its_records(
    pages: list[int], offset: int, nbytes: int, steps: tuple[tuple[int, int], ...]
) -> None:
    layout = PoolLayout.of(hybrid_spec(1, 1, 4, DType.FLOAT32, True), page_size=2, num_pages=10, num_slots=2)
    lease = LeasedMemory(layout, pages, [1])
    mine = {
        byte
        for page in pages
        for byte in range(layout.page_offset(page), layout.page_offset(page) + layout.page.nbytes)
    } | set(range(layout.slot_offset(1), layout.slot_offset(1) + layout.slot.nbytes))
    starts = [offset]
    for times, step in steps:
        starts = [start + number * step for start in starts for number in range(times)]
    inside = all(byte in mine for start in starts for byte in range(start, start + nbytes))
    try:
        lease.check(offset, nbytes, steps)
    except OutOfLease:
        # What lies in one piece is never refused; what repeats may be where it leaves one region for another.
        assert steps or not inside or nbytes <= 0
    else:
        assert inside
        assert nbytes > 0
        assert starts
