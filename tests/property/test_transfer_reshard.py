"""Resharding between any two tensor-parallel sizes: destination bytes are slices of the whole tensor, written once.

The oracle slices whole numpy arrays; it knows of no ranges, cuts or offsets.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pools.layout import Field, PoolLayout
from pools.spec import DType, PagedGroup, Segment, SlotGroup, StateSpec, TensorSpec, TpRank, share
from tests.stretches import stretches
from transfer.plan import LeasedMemory, plan_slots, plan_tokens
from transfer.reshard import Reshard, cuts

SIZES = (1, 2, 4, 8)
DTYPES = st.sampled_from([DType.FLOAT32, DType.BFLOAT16])
NUMPY = {DType.FLOAT32: np.uint32, DType.BFLOAT16: np.uint16}
Entry = tuple[int, str]


@st.composite
def tensors(draw: st.DrawFn, name: str) -> TensorSpec:
    """Any shape with one to three segments, whose units 1, 2, 4 or 8 ranks can share."""
    segments = tuple(
        Segment(f"s{number}", draw(st.sampled_from([1, 2, 4, 8, 16, 24])), draw(st.integers(1, 3)))
        for number in range(draw(st.integers(1, 3)))
    )
    before = draw(st.lists(st.integers(1, 3), max_size=1))
    after = draw(st.lists(st.integers(1, 3), max_size=2))
    shape = (*before, sum(segment.size for segment in segments), *after)
    return TensorSpec(name, shape, draw(DTYPES), len(before), segments)


@st.composite
def specs(draw: st.DrawFn) -> StateSpec:
    paged = PagedGroup("attention", (0, 2), (draw(tensors("k")), draw(tensors("v"))))
    slots = SlotGroup("recurrent", (1, 2), (draw(tensors("conv")), draw(tensors("ssm"))))
    return StateSpec((paged,) if draw(st.booleans()) else (), (slots,) if draw(st.booleans()) else ())


def part(whole: np.ndarray, tensor: TensorSpec, rank: TpRank, axis: int) -> np.ndarray:
    """The slice of `whole`, in which the tensor's sharded axis is `axis`, that a rank holds."""
    positions: list[int] = []
    begin = 0
    for segment in tensor.segments:
        units = share(segment.units, rank.rank, rank.size)
        positions += range(begin + units.start * segment.width, begin + units.stop * segment.width)
        begin += segment.size
    return np.take(whole, positions, axis=axis)


def tensor_of(spec: StateSpec, field: Field) -> TensorSpec:
    groups = [*spec.paged, *spec.slots]
    (found,) = (
        tensor
        for group in groups
        if field.layer in group.layers
        for tensor in group.tensors
        if tensor.name == field.name
    )
    return found


def view(block: np.ndarray, offset: int, field: Field) -> np.ndarray:
    """A field of the record at `offset`, as an array that can be written."""
    start = offset + field.offset
    return block[start : start + field.nbytes].view(NUMPY[field.dtype]).reshape(field.shape)


def block_of(
    layout: PoolLayout, spec: StateSpec, rank: TpRank, tokens: Mapping[Entry, np.ndarray],
    state: Mapping[Entry, np.ndarray], pages: list[int], slot: int, count: int,
) -> np.ndarray:  # fmt: skip
    """A rank's pool memory that holds `count` tokens and a state."""
    block = np.zeros(layout.nbytes, dtype=np.uint8)
    for field in layout.page.fields:
        whole = tokens[field.layer, field.name][:count]
        tensor = tensor_of(spec, field)
        mine = part(whole, tensor, rank, tensor.axis + 1)
        for token in range(count):
            page, at = divmod(token, layout.page_size)
            view(block, layout.page_offset(pages[page]), field)[at] = mine[token]
    for field in layout.slot.fields:
        tensor = tensor_of(spec, field)
        view(block, layout.slot_offset(slot), field)[...] = part(
            state[field.layer, field.name], tensor, rank, tensor.axis
        )
    return block


@st.composite
def cases(draw: st.DrawFn) -> tuple[StateSpec, int, int, int, int, int, int]:
    spec = draw(specs())
    page_sizes = st.sampled_from([1, 2, 4, 8])
    return (
        spec, draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES)), draw(page_sizes), draw(page_sizes),
        draw(st.integers(1, 20)), draw(st.integers(1, 9)),
    )  # fmt: skip


@given(cases())
def test_every_rank_gets_its_slices_and_every_byte_is_written_once(
    case: tuple[StateSpec, int, int, int, int, int, int],
) -> None:
    spec, prefill_size, decode_size, source_page, target_page, count, chunk = case
    random = np.random.default_rng(count)

    def numbers(tensor: TensorSpec, *before: int) -> np.ndarray:
        kind = NUMPY[tensor.dtype]
        return random.integers(1, np.iinfo(kind).max, (*before, *tensor.shape), dtype=kind)

    tokens = {(layer, t.name): numbers(t, count) for g in spec.paged for layer in g.layers for t in g.tensors}
    state = {(layer, t.name): numbers(t) for g in spec.slots for layer in g.layers for t in g.tensors}

    def layout(rank: TpRank, page_size: int) -> PoolLayout:
        return PoolLayout.of(spec.of_rank(rank.rank, rank.size), page_size=page_size, num_pages=23, num_slots=3)

    source_pages = list(random.permutation(23)[: -(-count // source_page)])
    target_pages = list(random.permutation(23)[: -(-count // target_page)])
    senders = [TpRank(rank, prefill_size) for rank in range(prefill_size)]
    blocks = {
        sender.rank: block_of(layout(sender, source_page), spec, sender, tokens, state, source_pages, 2, count)
        for sender in senders
    }
    for receiver in (TpRank(rank, decode_size) for rank in range(decode_size)):
        target = layout(receiver, target_page)
        lease = LeasedMemory(target, target_pages, [1] if target.slot.nbytes else [])
        block, written = np.zeros(target.nbytes, np.uint8), np.zeros(target.nbytes, np.int64)
        for sender in senders:
            reshard = Reshard.between(spec, layout(sender, source_page), target, sender, receiver)
            sent = 0
            ranges = []
            for stop in [*range(chunk, count, chunk), count]:
                upto = stop if stop == count else stop - stop % source_page
                if upto > sent and spec.paged:
                    ranges += plan_tokens(reshard, source_pages, target_pages, sent, upto)
                sent = upto
            ranges += plan_slots(reshard, [2], [1])
            for item in ranges:
                lease.check(item.target, item.nbytes, item.target_steps)
                for start, there, nbytes in stretches(item):
                    block[there : there + nbytes] = blocks[sender.rank][start : start + nbytes]
                    written[there : there + nbytes] += 1
        expected = block_of(target, spec, receiver, tokens, state, target_pages, 1, count)
        assert written.max(initial=0) <= 1
        assert (block == expected).all()


@pytest.mark.parametrize("prefill", SIZES)
@pytest.mark.parametrize("decode", SIZES)
@given(tensor=tensors("x"))
def test_each_element_comes_from_exactly_one_rank(prefill: int, decode: int, tensor: TensorSpec) -> None:
    for receiver in range(decode):
        target = TpRank(receiver, decode)
        written = np.zeros(tensor.of_rank(receiver, decode).nbytes, dtype=np.int64)
        for sender in range(prefill):
            limit = tensor.of_rank(sender, prefill).nbytes
            for source, there, nbytes in cuts(tensor, TpRank(sender, prefill), target):
                assert source >= 0
                assert source + nbytes <= limit
                written[there : there + nbytes] += 1
        assert (written == 1).all()


@pytest.mark.parametrize("size", SIZES)
@given(tensor=tensors("x"))
def test_equal_sizes_pair_each_rank_with_its_like(size: int, tensor: TensorSpec) -> None:
    for sender in range(size):
        for receiver in range(size):
            found = cuts(tensor, TpRank(sender, size), TpRank(receiver, size))
            if sender == receiver:
                assert found == ((0, 0, tensor.of_rank(sender, size).nbytes),)
            else:
                assert not found
