"""Late writers: memory that belongs to somebody else by now is never touched, whatever the back end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pools.layout import PoolLayout
from pools.lease import Lease
from pools.pools import Pools
from pools.spec import DType, PagedGroup, Segment, SlotGroup, StateSpec, TensorSpec
from tests.landings import EVERY_MEDIUM, GatedChannel, Pair, pair_of, plain
from transfer import flight
from transfer.plan import LeasedMemory, plan_slots, plan_tokens
from transfer.sender import Drained, Event, Outcomes, Sender, SendFailed, Sent
from wire.messages import AttemptId

KV = tuple(TensorSpec(name, (2, 64), DType.FLOAT32, 0, (Segment("h", 2),)) for name in ("k", "v"))
STATE = TensorSpec("state", (4, 999), DType.FLOAT32, 0, (Segment("h", 4),))
SPEC = StateSpec((PagedGroup("attention", (0, 1), KV),), (SlotGroup("delta", (2,), (STATE,)),))
LAYOUT = PoolLayout.of(SPEC, page_size=16, num_pages=24, num_slots=3)
TOKENS = 16 * 8


@pytest.fixture(params=EVERY_MEDIUM)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request.param, plain(LAYOUT)) as made:
        yield made


@pytest.fixture(params=["tcp", "collective"])
def two_sided(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Where decode itself takes the bytes."""
    with pair_of(request.param, plain(LAYOUT)) as made:
        yield made


def take(pools: Pools, attempt: str) -> Lease:
    lease = pools.reserve(attempt, TOKENS)
    assert isinstance(lease, Lease)
    return lease


def bytes_of(lease: Lease) -> np.ndarray:
    """Which bytes of the pools a lease owns."""
    mine = np.zeros(LAYOUT.nbytes, dtype=bool)
    for page in lease.pages:
        mine[LAYOUT.page_offset(page) : LAYOUT.page_offset(page) + LAYOUT.page.nbytes] = True
    for slot in lease.slots:
        mine[LAYOUT.slot_offset(slot) : LAYOUT.slot_offset(slot) + LAYOUT.slot.nbytes] = True
    return mine


def next_event(outcomes: Outcomes, wanted: type[Event], attempt: str) -> None:
    deadline = threading.Event()
    for _ in range(3000):
        for event in outcomes.take():
            if isinstance(event, wanted) and event.attempt == attempt:
                return
        deadline.wait(0.01)
    raise AssertionError(f"no {wanted.__name__} of {attempt}")


def hand_over(sender: Sender, attempt: AttemptId, source: Lease, target: Lease, pair: Pair) -> None:
    """As prefill does: pages in two chunks, the state with the second."""
    half = TOKENS // 2
    sender.write(attempt, plan_tokens(pair.reshard, source.pages, target.pages, 0, half))
    sender.write(attempt, plan_tokens(pair.reshard, source.pages, target.pages, half, TOKENS))
    sender.write(attempt, plan_slots(pair.reshard, source.slots, target.slots))


def pools() -> Pools:
    return Pools(num_rows=3, num_pages=24, num_slots=3, page_size=16, max_pages_per_request=8, slots_per_request=1)


@pytest.mark.parametrize("writes_before", [0, 1, 2])
def test_a_writer_that_wakes_up_late_touches_nothing_of_the_next_owner(pair: Pair, writes_before: int) -> None:
    """Decode gives up a hand-off in the middle; the memory is reused; the writer goes on."""
    here, there, outcomes = pools(), pools(), Outcomes()
    late = AttemptId("late")
    source, target = take(here, late), take(there, late)
    pair.landing.open(late, LeasedMemory(LAYOUT, target.pages, target.slots))
    channel = GatedChannel(pair.connect())
    sender = Sender(channel, outcomes.put, "test")
    hand_over(sender, late, source, target, pair)
    for _ in range(writes_before):
        channel.gate.release()
    for _ in range(writes_before + 1):
        assert channel.entered.acquire(timeout=30)
    # Decode gives up, with a write in hand on the other side.
    pair.landing.close_attempt(late)
    if pair.landing.peer_writes:
        there.fence(target)
        hungry = [there.reserve(f"other-{number}", TOKENS) for number in range(3)]
        owned = [lease for lease in hungry if isinstance(lease, Lease)]
        assert not any(set(lease.pages) & set(target.pages) for lease in owned)
        for lease in owned:
            there.release(lease)
    else:
        there.release(target)
    # Prefill hears of it only now, and its write goes on; `Drained` is what makes it say `Quiet`.
    sender.cancel(late)
    if pair.landing.peer_writes:
        channel.gate.release(3)
        next_event(outcomes, Drained, late)
        there.unfence(late)
    owner = take(there, "owner")
    assert set(owner.pages) & set(target.pages)
    pair.target[bytes_of(owner)] = 0xA5
    before = pair.target.copy()
    if not pair.landing.peer_writes:
        channel.gate.release(3)
        next_event(outcomes, Drained, late)
    # A hand-off to somebody else over the same link shows that everything before it has come through.
    probe = AttemptId("probe")
    reply = take(there, probe)
    pair.landing.open(probe, LeasedMemory(LAYOUT, reply.pages, reply.slots))
    sender.write(probe, plan_tokens(pair.reshard, source.pages, reply.pages, 0, TOKENS))
    sender.finish(probe)
    channel.gate.release(3)
    next_event(outcomes, Sent, probe)
    mine = bytes_of(reply)
    assert (pair.target[~mine] == before[~mine]).all()
    there.audit()
    sender.close()


def test_a_cancel_ends_a_wait_for_a_peer_that_is_silent(two_sided: Pair) -> None:
    """Back-pressure: a landing that takes nothing holds the sender, boundedly, and a cancel lets go at once."""
    here, outcomes = pools(), Outcomes()
    source, target = take(here, "a"), take(pools(), "a")
    attempt = AttemptId("a")
    two_sided.landing.open(attempt, LeasedMemory(LAYOUT, target.pages, target.slots))
    gate = two_sided.landing._gate  # type: ignore[attr-defined]
    sender = Sender(two_sided.connect(), outcomes.put, "test")
    with gate._lock:
        for _ in range(20):
            hand_over(sender, attempt, source, target, two_sided)
        sender.finish(attempt)
        assert not outcomes.take()
        sender.cancel(attempt)
        next_event(outcomes, Drained, attempt)
    two_sided.landing.close_attempt(attempt)
    sender.close()


def test_a_peer_that_never_answers_fails_the_attempt(two_sided: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "SILENCE_S", 1.0)
    here, outcomes = pools(), Outcomes()
    source, target = take(here, "a"), take(pools(), "a")
    attempt, after = AttemptId("a"), AttemptId("b")
    two_sided.landing.open(attempt, LeasedMemory(LAYOUT, target.pages, target.slots))
    sender = Sender(two_sided.connect(), outcomes.put, "test")
    gate = two_sided.landing._gate  # type: ignore[attr-defined]
    with gate._lock:
        hand_over(sender, attempt, source, target, two_sided)
        sender.finish(attempt)
        next_event(outcomes, SendFailed, attempt)
    sender.cancel(attempt)
    next_event(outcomes, Drained, attempt)
    # It answers again: the link is as good as new.
    two_sided.landing.open(after, LeasedMemory(LAYOUT, target.pages, target.slots))
    hand_over(sender, after, source, target, two_sided)
    sender.finish(after)
    next_event(outcomes, Sent, after)
    assert two_sided.landing.close_attempt(after) == 8 * LAYOUT.page.nbytes + LAYOUT.slot.nbytes
    sender.close()
