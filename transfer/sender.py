"""The prefill side of all hand-offs over one link: a thread that writes while the worker computes.

Hand-offs take turns, a slice of bytes at a time, so that a small one never waits for the whole of a large one. The
jobs of each are done in order. So when the marker that `finish` or `cancel` puts behind them is reached, all of its
bytes have been written, or none will be any more; and that is when the worker is told.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from transfer.errors import TransferError
from transfer.medium import Channel
from transfer.plan import Range, slices
from wire.messages import AttemptId, Digests

SLICE_BYTES = 4 << 20
"""What a hand-off moves before another has its turn."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sent:
    """Every byte of the attempt is at its destination: how many, and for how many seconds they were moving."""

    attempt: AttemptId
    nbytes: int
    seconds: float
    digests: Digests = ()
    """Of every field moved, where transfers are verified."""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The attempt's bytes could not be moved; none will be any more."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """A cancelled attempt: nothing of it will be written any more."""

    attempt: AttemptId


Event = Sent | SendFailed | Drained


class Outcomes:
    """Events from the sender threads to the worker's loop, with a socket that wakes the loop's poll."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """For polling."""
        return self._reader.fileno()

    def put(self, event: Event) -> None:
        """From any thread."""
        self._events.put(event)
        with suppress(BlockingIOError):  # full of wake-ups already, which is as good
            self._writer.send(b"\0")

    def take(self) -> list[Event]:
        """All events so far, from the loop's thread."""
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        events: list[Event] = []
        while not self._events.empty():
            events.append(self._events.get())
        return events


class _Marker(Enum):
    FINISH = auto()
    CANCEL = auto()


_Job = tuple[AttemptId, Sequence[Range] | _Marker]


@dataclass
class _Progress:
    """An attempt's slices still to be written, and what has been."""

    backlog: deque[list[Range]] = field(default_factory=deque)
    finishing: bool = False
    failed: bool = False
    nbytes: int = 0
    seconds: float = 0.0
    digests: list[int] = field(default_factory=list)


class Sender:
    """`channel` belongs to the sender's thread from here on, from which `put` is called with each outcome.

    `digests`, if given, makes the proof of ranges that have been written.

    The queue is bounded by what feeds it: a request adds one job a chunk and one marker, and the worker holds a
    bounded number of requests.
    """

    def __init__(
        self,
        channel: Channel,
        put: Callable[[Event], None],
        name: str,
        digests: Callable[[Sequence[Range]], Digests] | None = None,
    ) -> None:
        self._channel = channel
        self._put = put
        self._digests = digests
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._cancelled: set[AttemptId] = set()
        self._open: dict[AttemptId, _Progress] = {}
        """In the order of their turns."""
        self._thread = threading.Thread(target=self._run, name=f"sender-{name}", daemon=True)
        self._thread.start()

    def write(self, attempt: AttemptId, ranges: Sequence[Range]) -> None:
        """Move these bytes of the attempt, behind what was asked before. Their memory must stay until the outcome."""
        self._jobs.put((attempt, ranges))

    def finish(self, attempt: AttemptId) -> None:
        """Ask for `Sent` once everything asked so far is at its destination."""
        self._jobs.put((attempt, _Marker.FINISH))

    def cancel(self, attempt: AttemptId) -> None:
        """Write no more of the attempt than the slice in hand; `Drained` follows."""
        self._cancelled.add(attempt)
        self._jobs.put((attempt, _Marker.CANCEL))

    def close(self) -> None:
        """Let the thread end after the slice in hand; not waited for."""
        self._jobs.put(None)

    def _run(self) -> None:
        served: AttemptId | None = None
        while self._take_jobs():
            if served in self._open:  # to the end of the line, behind those that came meanwhile
                self._open[served] = self._open.pop(served)
            served = next((attempt for attempt, progress in self._open.items() if progress.backlog), None)
            if served is not None:
                self._guarded(served, self._open[served], self._write)
        self._channel.close()

    def _take_jobs(self) -> bool:
        """All jobs that have come; waits for one when there is nothing to write. False at the end."""
        idle = not any(progress.backlog for progress in self._open.values())
        while idle or not self._jobs.empty():
            idle = False
            job = self._jobs.get()
            if job is None:
                return False
            self._take(*job)
        return True

    def _take(self, attempt: AttemptId, work: Sequence[Range] | _Marker) -> None:
        progress = self._open.setdefault(attempt, _Progress())
        if work is _Marker.CANCEL:  # always the last
            del self._open[attempt]
            self._channel.abandon(attempt)
            self._cancelled.discard(attempt)
            self._put(Drained(attempt))
        elif work is _Marker.FINISH:
            progress.finishing = True
            self._guarded(attempt, progress, self._conclude)
        elif attempt not in self._cancelled and not progress.failed:
            progress.backlog.extend(slices(work, SLICE_BYTES))

    def _guarded(self, attempt: AttemptId, progress: _Progress, work: Callable[[AttemptId, _Progress], None]) -> None:
        """Whatever goes wrong ends this attempt only."""
        try:
            work(attempt, progress)
        except TransferError as error:
            self._fail(attempt, progress, str(error))
        except Exception as error:  # a bug of ours must fail this attempt, not silence all later ones
            log.exception("the transfer of %s failed", attempt)
            self._fail(attempt, progress, f"{type(error).__name__}: {error}")

    def _fail(self, attempt: AttemptId, progress: _Progress, reason: str) -> None:
        progress.failed = True
        progress.backlog.clear()
        self._put(SendFailed(attempt, reason))

    def _write(self, attempt: AttemptId, progress: _Progress) -> None:
        """The attempt's turn: its next slice."""
        if attempt in self._cancelled:
            progress.backlog.clear()
            return
        ranges = progress.backlog.popleft()
        started = time.monotonic()
        self._channel.write(attempt, ranges, partial(self._cancelled.__contains__, attempt))
        progress.seconds += time.monotonic() - started
        progress.nbytes += sum(item.total for item in ranges)
        if self._digests is not None:
            progress.digests += self._digests(ranges)
        self._conclude(attempt, progress)

    def _conclude(self, attempt: AttemptId, progress: _Progress) -> None:
        """Say `Sent` if all that was asked for is at its destination."""
        if progress.backlog or not progress.finishing or progress.failed:
            return
        started = time.monotonic()
        self._channel.wait(attempt, partial(self._cancelled.__contains__, attempt))
        progress.seconds += time.monotonic() - started
        if attempt not in self._cancelled:
            del self._open[attempt]
            self._channel.abandon(attempt)
            self._put(Sent(attempt, progress.nbytes, progress.seconds, tuple(progress.digests)))
