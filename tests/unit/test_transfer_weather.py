"""A network that drops, repeats, delays and cuts: hand-offs by tcp arrive whole all the same, or fail and say so."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pools.layout import PoolLayout
from pools.spec import DType, PagedGroup, Segment, StateSpec, TensorSpec, TpRank
from tests.landings import EVERY_MEDIUM, Pair, pair_of, plain
from tests.proxy import CuttingProxy, MessageProxy, seeded_fate
from tests.specs import hybrid_spec
from tests.stretches import moved
from transfer import flight
from transfer.plan import LeasedMemory, Range, plan_slots, plan_tokens
from transfer.reshard import Reshard
from wire.messages import AttemptId

SPEC = StateSpec((PagedGroup("a", (0, 1), (TensorSpec("k", (2, 64), DType.FLOAT32, 0, (Segment("h", 2),)),)),))
LAYOUT = PoolLayout.of(SPEC, page_size=64, num_pages=64, num_slots=0)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(flight, "_RESEND_S", 0.2)
    with pair_of("tcp", plain(LAYOUT)) as made:
        yield made


def hand_over(pair: Pair, reach: str, count: int) -> None:
    """`count` hand-offs by one channel, each to other pages, each looked at byte for byte."""
    random = np.random.default_rng(count)
    channel = pair.connect(reach)
    for number in range(count):
        attempt = AttemptId(f"attempt-{number}")
        here, there = random.permutation(64)[:40], random.permutation(64)[:40]
        pair.target[:] = 0
        pair.landing.open(attempt, LeasedMemory(LAYOUT, there.tolist(), []))
        ranges = plan_tokens(pair.reshard, here.tolist(), there.tolist(), 0, 40 * 64)
        for start in range(0, len(ranges), 5):
            channel.write(attempt, ranges[start : start + 5])
        channel.wait(attempt)
        assert pair.landing.close_attempt(attempt) == 40 * LAYOUT.page.nbytes
        channel.abandon(attempt)
        assert (pair.target == moved(pair.source, len(pair.target), ranges)).all()
    channel.close()


@pytest.mark.parametrize("seed", range(4))
def test_lost_repeated_and_late_messages_change_nothing(pair: Pair, seed: int) -> None:
    proxy = MessageProxy(pair.landing.reach, seeded_fate(seed, bad=0.25))
    hand_over(pair, proxy.endpoint, 6)
    assert proxy.accidents > 10
    proxy.close()


@pytest.mark.parametrize("after", [1000, 300_000, 1_000_000])
def test_connections_cut_in_the_middle_change_nothing(pair: Pair, after: int) -> None:
    proxy = CuttingProxy(pair.landing.reach, after, cuts=3)
    hand_over(pair, proxy.endpoint, 4)
    assert proxy.cuts_left == 0
    proxy.close()


@pytest.mark.parametrize("medium", EVERY_MEDIUM)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("page_sizes", [(4, 4), (4, 8), (8, 4)])
def test_every_back_end_reshards(medium: str, sizes: tuple[int, int], page_sizes: tuple[int, int]) -> None:
    """Rank by rank, against a byte-wise copy."""
    spec = hybrid_spec(2, 4, 8, DType.BFLOAT16, slots=True)
    tokens = 29
    for sender in range(sizes[0]):
        for receiver in range(sizes[1]):
            ranks = TpRank(sender, sizes[0]), TpRank(receiver, sizes[1])
            layouts = [
                PoolLayout.of(spec.of_rank(rank.rank, rank.size), page_size=size, num_pages=12, num_slots=2)
                for rank, size in zip(ranks, page_sizes, strict=True)
            ]
            reshard = Reshard.between(spec, *layouts, *ranks)
            if reshard.empty:
                continue
            pages = [np.random.default_rng(size).permutation(12)[:8].tolist() for size in page_sizes]
            ranges: list[Range] = plan_tokens(reshard, pages[0], pages[1], 0, tokens)
            ranges += plan_slots(reshard, [1], [0])
            with pair_of(medium, reshard) as pair:
                attempt = AttemptId("a")
                pair.landing.open(attempt, LeasedMemory(layouts[1], pages[1], [0]))
                channel = pair.connect()
                channel.write(attempt, ranges)
                channel.wait(attempt)
                channel.abandon(attempt)
                assert (pair.target == moved(pair.source, len(pair.target), ranges)).all()
                channel.close()
