"""The contract of every transfer back end, and what `Sender` makes of it. The oracle is a plain copy."""

from __future__ import annotations

import socket as sockets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import zmq

from pools.layout import PoolLayout
from pools.spec import DType, PagedGroup, Segment, StateSpec, TensorSpec
from transfer.errors import MediumUnusable, TransferError
from transfer.media import choose_medium, media_of
from transfer.medium import Channel, Landing
from transfer.plan import LeasedMemory, Range
from transfer.segment import Segment as SharedSegment
from transfer.sender import Drained, Event, Outcomes, Sender, SendFailed, Sent
from transfer.shm import ShmChannel, ShmLanding
from transfer.tcp import TcpChannel, TcpLanding
from wire.messages import AttemptId, Incarnation, PeerHello

ONE = AttemptId("one/0")
TWO = AttemptId("two/0")
SPEC = StateSpec((PagedGroup("a", (0, 1), (TensorSpec("k", (2, 64), DType.FLOAT32, 0, (Segment("h", 2),)),)),))
LAYOUT = PoolLayout.of(SPEC, page_size=16, num_pages=64, num_slots=0)


@dataclass
class Pair:
    """Both ends of one medium: a source block, a target block, and how to connect them."""

    source: np.ndarray
    target: np.ndarray
    landing: Landing
    connect: Callable[[], Channel]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Pair]:
    source = np.random.default_rng(1).integers(0, 256, LAYOUT.nbytes, dtype=np.uint8)
    landing: Landing
    if request.param == "shm":
        segment = SharedSegment.create("test", LAYOUT.nbytes)
        target = np.frombuffer(segment.memory, dtype=np.uint8)[: LAYOUT.nbytes]
        landing = ShmLanding(segment)
        yield Pair(source, target, landing, lambda: ShmChannel(source, landing.reach, LAYOUT.nbytes))
    else:
        target = np.zeros(LAYOUT.nbytes, dtype=np.uint8)
        landing = TcpLanding(context, target, "tcp://127.0.0.1:*")
        yield Pair(source, target, landing, lambda: TcpChannel(context, source, landing.reach))
    landing.close()


def pages(source: Sequence[int], target: Sequence[int]) -> list[Range]:
    return [
        Range(LAYOUT.page_offset(a), LAYOUT.page_offset(b), LAYOUT.page.nbytes)
        for a, b in zip(source, target, strict=True)
    ]


def expected(pair: Pair, ranges: Sequence[Range]) -> np.ndarray:
    block = np.zeros_like(pair.target)
    for item in ranges:
        block[item.target : item.target + item.nbytes] = pair.source[item.source : item.source + item.nbytes]
    return block


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
    assert (pair.target == expected(pair, ranges)).all()
    assert pair.landing.close_attempt(ONE) in (None, 4 * LAYOUT.page.nbytes)
    channel.close()


def test_a_range_larger_than_a_message_arrives(pair: Pair) -> None:
    whole = [Range(0, 0, LAYOUT.nbytes)]
    pair.landing.open(ONE, LeasedMemory(LAYOUT, range(64), []))
    channel = pair.connect()
    channel.write(ONE, whole)
    assert (pair.target == pair.source).all()
    channel.close()


def test_many_small_ranges_arrive(pair: Pair) -> None:
    ranges = [Range(at, LAYOUT.nbytes - at - 8, 8) for at in range(0, 64 * 500, 64)]
    pair.landing.open(ONE, LeasedMemory(LAYOUT, range(64), []))
    channel = pair.connect()
    channel.write(ONE, ranges)
    assert (pair.target == expected(pair, ranges)).all()
    channel.close()


def test_an_empty_write_is_nothing(pair: Pair) -> None:
    channel = pair.connect()
    channel.write(ONE, [])
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


class GatedChannel:
    """A channel that waits at each write until it is let through."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def write(self, attempt: AttemptId, ranges: Sequence[Range]) -> None:
        self.entered.release()
        assert self.gate.acquire(timeout=20)
        self._inner.write(attempt, ranges)

    def close(self) -> None:
        self._inner.close()


def test_a_cancelled_attempt_writes_no_more_than_the_job_in_hand(pair: Pair) -> None:
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
    assert (pair.target == expected(pair, ranges[:1])).all()
    pair.landing.open(TWO, LeasedMemory(LAYOUT, [9], []))
    sender.write(TWO, pages([9], [9]))
    sender.finish(TWO)
    channel.gate.release()
    (event,) = wait_for(outcomes, 1)
    assert isinstance(event, Sent)
    assert event.attempt == TWO
    sender.close()


class BrokenChannel:
    """A channel whose every write fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def write(self, attempt: AttemptId, ranges: Sequence[Range]) -> None:
        raise self._error

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


def test_tcp_refuses_bytes_outside_the_lease(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    target = np.zeros(LAYOUT.nbytes, dtype=np.uint8)
    source = np.ones(LAYOUT.nbytes, dtype=np.uint8)
    landing = TcpLanding(context, target, "tcp://127.0.0.1:*")
    landing.open(ONE, LeasedMemory(LAYOUT, [5], []))
    channel = TcpChannel(context, source, landing.reach)
    with pytest.raises(TransferError, match="not in the memory of this lease"):
        channel.write(ONE, pages([0], [6]))
    with pytest.raises(TransferError, match="not open"):
        channel.write(TWO, pages([0], [5]))
    landing.close_attempt(ONE)
    with pytest.raises(TransferError, match="not open"):
        channel.write(ONE, pages([0], [5]))
    assert not target.any()
    channel.close()
    landing.close()


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
