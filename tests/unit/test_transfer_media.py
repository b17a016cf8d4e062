"""The contract of every transfer back end, and what `Sender` makes of it. The oracle is a plain copy."""

from __future__ import annotations

import socket as sockets
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import zmq

from pools.layout import PoolLayout
from pools.spec import DType, PagedGroup, Segment, StateSpec, TensorSpec
from tests.landings import EVERY_MEDIUM, GatedChannel, Pair, pair_of, plain
from tests.stretches import moved
from transfer.errors import MediumUnusable, TransferError
from transfer.media import choose_medium, media_of
from transfer.medium import Channel, never
from transfer.plan import LeasedMemory, Range
from transfer.segment import Segment as SharedSegment
from transfer.sender import SLICE_BYTES, Drained, Event, Outcomes, Sender, SendFailed, Sent
from transfer.shm import ShmChannel
from transfer.tcp import TcpChannel, TcpLanding
from wire.messages import AttemptId, Incarnation, PeerHello

ONE = AttemptId("one/0")
TWO = AttemptId("two/0")
SPEC = StateSpec((PagedGroup("a", (0, 1), (TensorSpec("k", (2, 64), DType.FLOAT32, 0, (Segment("h", 2),)),)),))
LAYOUT = PoolLayout.of(SPEC, page_size=16, num_pages=64, num_slots=0)


@pytest.fixture(params=EVERY_MEDIUM)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request.param, plain(LAYOUT)) as made:
        yield made


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def pages(source: Sequence[int], target: Sequence[int]) -> list[Range]:
    return [
        Range(LAYOUT.page_offset(a), LAYOUT.page_offset(b), LAYOUT.page.nbytes)
        for a, b in zip(source, target, strict=True)
    ]


def expected(pair: Pair, ranges: Sequence[Range]) -> np.ndarray:
    return moved(pair.source, len(pair.target), ranges)


def wait_for(outcomes: Outcomes, count: int) -> list[Event]:
    """The next `count` events, by the descriptor that wakes a worker's loop."""
    events: list[Event] = []
    poller = zmq.Poller()
    poller.register(outcomes.fileno(), zmq.POLLIN)
    while len(events) < count:
        assert poller.poll(20_000), f"only {events} came"
        events += outcomes.take()
    return events


def test_bytes_arrive_and_no_others_change(pair: Pair) -> None:
    ranges = pages([3, 9, 4, 60], [7, 0, 33, 8])
    pair.landing.open(ONE, LeasedMemory(LAYOUT, [7, 0, 33, 8], []))
    channel = pair.connect()
    channel.write(ONE, ranges)
    channel.wait(ONE)
    assert (pair.target == expected(pair, ranges)).all()
    assert pair.landing.close_attempt(ONE) in (None, 4 * LAYOUT.page.nbytes)
    channel.close()


def test_a_range_larger_than_a_message_arrives(pair: Pair) -> None:
    whole = [Range(0, 0, LAYOUT.nbytes)]
    pair.landing.open(ONE, LeasedMemory(LAYOUT, range(64), []))
    channel = pair.connect()
    channel.write(ONE, whole)
    channel.wait(ONE)
    assert (pair.target == pair.source).all()
    channel.close()


def test_many_small_ranges_arrive(pair: Pair) -> None:
    ranges = [Range(at, LAYOUT.nbytes - at - 8, 8) for at in range(0, 64 * 500, 64)]
    pair.landing.open(ONE, LeasedMemory(LAYOUT, range(64), []))
    channel = pair.connect()
    channel.write(ONE, ranges)
    channel.wait(ONE)
    assert (pair.target == expected(pair, ranges)).all()
    channel.close()


def test_an_empty_write_is_nothing(pair: Pair) -> None:
    channel = pair.connect()
    channel.write(ONE, [])
    channel.wait(ONE)
    assert not pair.target.any()
    channel.close()


def test_sender_reports_what_it_sent(pair: Pair) -> None:
    outcomes = Outcomes()
    ranges = pages([0, 1, 2], [5, 4, 3])
    pair.landing.open(ONE, LeasedMemory(LAYOUT, [3, 4, 5], []))
    sender = Sender(pair.connect(), outcomes.put, "test")
    sender.write(ONE, ranges[:1])
    sender.write(ONE, ranges[1:])
    sender.finish(ONE)
    (event,) = wait_for(outcomes, 1)
    assert isinstance(event, Sent)
    assert event.nbytes == 3 * LAYOUT.page.nbytes
    assert (pair.target == expected(pair, ranges)).all()
    sender.close()


def test_a_cancelled_attempt_writes_no_more_than_the_slice_in_hand(pair: Pair) -> None:
    """`Drained` comes after the last write; what follows it never sees a late one."""
    outcomes = Outcomes()
    ranges = pages([0, 1, 2], [0, 1, 2])
    pair.landing.open(ONE, LeasedMemory(LAYOUT, [0, 1, 2], []))
    channel = GatedChannel(pair.connect())
    sender = Sender(channel, outcomes.put, "test")
    for item in ranges:
        sender.write(ONE, [item])
    assert channel.entered.acquire(timeout=20)
    sender.cancel(ONE)
    assert not outcomes.take()
    channel.gate.release()
    assert wait_for(outcomes, 1) == [Drained(ONE)]
    pair.landing.close_attempt(ONE)
    after = pair.target.copy()
    assert not after[LAYOUT.page.nbytes :].any()
    pair.landing.open(TWO, LeasedMemory(LAYOUT, [9], []))
    sender.write(TWO, pages([9], [9]))
    sender.finish(TWO)
    channel.gate.release()
    (event,) = wait_for(outcomes, 1)
    assert isinstance(event, Sent)
    assert event.attempt == TWO
    assert (pair.target == after + expected(pair, pages([9], [9]))).all()
    sender.close()


@pytest.mark.parametrize("small_first", [True, False])
def test_a_small_hand_off_waits_for_one_slice_of_a_large_one_at_most(small_first: bool) -> None:
    turns: list[tuple[AttemptId, int]] = []

    class Recorder:
        def __init__(self) -> None:
            self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(0)

        def write(self, attempt: AttemptId, ranges: Sequence[Range], cancelled: Callable[[], bool] = never) -> None:
            turns.append((attempt, sum(item.total for item in ranges)))
            self.entered.release()
            assert self.gate.acquire(timeout=20)

        def wait(self, attempt: AttemptId, cancelled: Callable[[], bool] = never) -> None: ...
        def abandon(self, attempt: AttemptId) -> None: ...
        def close(self) -> None: ...

    outcomes = Outcomes()
    channel = Recorder()
    sender = Sender(channel, outcomes.put, "test")
    jobs = [(ONE, [Range(0, 0, 5 * SLICE_BYTES)]), (TWO, [Range(0, 0, 10)])]
    for attempt, ranges in reversed(jobs) if small_first else jobs:
        sender.write(attempt, ranges)
        sender.finish(attempt)
        if attempt == ONE and not small_first:
            assert channel.entered.acquire(timeout=20)
    for _ in range(6):
        channel.gate.release()
    events = wait_for(outcomes, 2)
    assert [event.attempt for event in events] == [TWO, ONE]
    assert [attempt for attempt, _ in turns].index(TWO) <= 1
    assert sum(nbytes for attempt, nbytes in turns if attempt == ONE) == 5 * SLICE_BYTES
    assert max(nbytes for _, nbytes in turns) == SLICE_BYTES
    sender.close()


class BrokenChannel:
    """A channel whose every write fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def write(self, attempt: AttemptId, ranges: Sequence[Range], cancelled: Callable[[], bool] = never) -> None:
        raise self._error

    def wait(self, attempt: AttemptId, cancelled: Callable[[], bool] = never) -> None: ...

    def abandon(self, attempt: AttemptId) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("error", [TransferError("no way"), ZeroDivisionError("a bug")])
def test_a_failed_write_fails_its_attempt_once_and_spares_the_next(error: Exception) -> None:
    outcomes = Outcomes()
    sender = Sender(BrokenChannel(error), outcomes.put, "test")
    sender.write(ONE, pages([0], [0]))
    sender.write(ONE, pages([1], [1]))
    sender.finish(ONE)
    (failed,) = wait_for(outcomes, 1)
    assert isinstance(failed, SendFailed)
    assert failed.attempt == ONE
    sender.cancel(ONE)
    sender.write(TWO, pages([0], [0]))
    drained, failed = wait_for(outcomes, 2)
    assert drained == Drained(ONE)
    assert isinstance(failed, SendFailed)
    assert failed.attempt == TWO
    sender.close()


@pytest.mark.parametrize("medium", ["tcp", "collective"])
def test_bytes_outside_the_lease_are_refused(medium: str) -> None:
    with pair_of(medium, plain(LAYOUT)) as pair:
        pair.landing.open(ONE, LeasedMemory(LAYOUT, [5], []))
        channel = pair.connect()
        with pytest.raises(TransferError, match="not in the memory of this lease"):
            move(channel, ONE, pages([0], [6]))
        with pytest.raises(TransferError, match="not open"):
            move(channel, TWO, pages([0], [5]))
        pair.landing.close_attempt(ONE)
        with pytest.raises(TransferError, match="not open"):
            move(channel, ONE, pages([0], [5]))
        assert not pair.target.any()
        channel.close()


def move(channel: Channel, attempt: AttemptId, ranges: Sequence[Range]) -> None:
    try:
        channel.write(attempt, ranges)
        channel.wait(attempt)
    finally:
        channel.abandon(attempt)


def test_tcp_survives_nonsense(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    target = np.zeros(LAYOUT.nbytes, dtype=np.uint8)
    source = np.ones(LAYOUT.nbytes, dtype=np.uint8)
    landing = TcpLanding(context, target, "tcp://127.0.0.1:*")
    nonsense = context.socket(zmq.DEALER)
    nonsense.connect(landing.reach)
    for frames in (
        [b""],
        [b"\xc1"],
        [b"x" * 1000, b"y"],
        [b"\x93\x01\x02\x03"],
        [b"\x93\xa1a\x02\x92\x00\x05", b"1"],
    ):
        nonsense.send_multipart(frames)
    host, port = landing.reach.removeprefix("tcp://").rsplit(":", 1)
    with sockets.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 64)
    landing.open(ONE, LeasedMemory(LAYOUT, [5], []))
    channel = TcpChannel(context, source, landing.reach)
    channel.write(ONE, pages([0], [5]))
    channel.wait(ONE)
    assert target.sum() == LAYOUT.page.nbytes
    channel.close()
    nonsense.close(linger=0)
    landing.close()


def test_a_segment_that_is_gone_or_another_is_refused() -> None:
    segment = SharedSegment.create("test", 4096)
    reach = segment.reach.to_json()
    source = np.zeros(8192, dtype=np.uint8)
    with pytest.raises(MediumUnusable, match="4096 bytes, its pools 8192"):
        ShmChannel(source, reach, 8192)
    other = reach.replace(f'"inode": {segment.reach.inode}', '"inode": 1')
    with pytest.raises(MediumUnusable, match="not the peer's shared memory any more"):
        ShmChannel(source, other, 4096)
    segment.close()
    with pytest.raises(MediumUnusable):
        ShmChannel(source, reach, 4096)
    with pytest.raises(MediumUnusable, match="described by"):
        ShmChannel(source, "not json", 4096)


def hello(media: tuple[str, ...], host: str) -> PeerHello:
    return PeerHello(1, "prefill-0", Incarnation("i"), "f", SPEC, 16, media, host, 1)


@pytest.mark.parametrize(
    ("prefill", "decode", "host", "chosen"),
    [
        (("shm", "tcp"), ("shm", "tcp"), "here", "shm"),
        (("shm", "tcp"), ("shm", "tcp"), "elsewhere", "tcp"),
        (("tcp",), ("shm", "tcp"), "here", "tcp"),
        (("shm", "tcp"), ("tcp",), "here", "tcp"),
    ],
)
def test_the_best_common_back_end_is_chosen(
    prefill: tuple[str, ...], decode: tuple[str, ...], host: str, chosen: str
) -> None:
    assert choose_medium(hello(prefill, host), decode, "here") == chosen


def test_no_common_back_end_is_named() -> None:
    with pytest.raises(MediumUnusable, match=r"prefill allows shm, decode shm, and they are not on one host"):
        choose_medium(hello(("shm",), "elsewhere"), ("shm",), "here")
    with pytest.raises(MediumUnusable, match="there is no transfer back end 'rdma'"):
        media_of("rdma")
