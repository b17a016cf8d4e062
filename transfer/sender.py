"""The prefill side of all hand-offs over one link: a thread that writes while the worker computes.

Jobs of one link are done in order. So when the marker that `finish` or `cancel` puts behind an attempt's jobs is
reached, all of its bytes have been written, or none will be any more; and that is when the worker is told.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from transfer.errors import TransferError
from transfer.medium import Channel
from transfer.plan import Range
from transfer.verify import Digest
from wire.messages import AttemptId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sent:
    """Every byte of the attempt is at its destination: how many, and for how many seconds they were moving."""

    attempt: AttemptId
    nbytes: int
    seconds: float
    digests: tuple[Digest, ...] = ()
    """Of every range, where transfers are verified."""


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


@dataclass
class _Progress:
    nbytes: int = 0
    seconds: float = 0.0
    digests: list[Digest] = field(default_factory=list)


class Sender:
    """`channel` belongs to the sender's thread from here on, from which `put` is called with each outcome.

    `digest`, if given, makes the proof of a range that has been written.

    The queue is bounded by what feeds it: a request adds one job a chunk and one marker, and the worker holds a
    bounded number of requests.
    """

    def __init__(
        self,
        channel: Channel,
        put: Callable[[Event], None],
        name: str,
        digest: Callable[[Range], Digest] | None = None,
    ) -> None:
        self._channel = channel
        self._put = put
        self._digest = digest
        self._jobs: queue.SimpleQueue[tuple[AttemptId, Sequence[Range] | _Marker] | None] = queue.SimpleQueue()
        self._cancelled: set[AttemptId] = set()
        self._progress: dict[AttemptId, _Progress] = {}
        self._failed: set[AttemptId] = set()
        self._thread = threading.Thread(target=self._run, name=f"sender-{name}", daemon=True)
        self._thread.start()

    def write(self, attempt: AttemptId, ranges: Sequence[Range]) -> None:
        """Move these bytes of the attempt, behind what was asked before. Their memory must stay until the outcome."""
        self._jobs.put((attempt, ranges))

    def finish(self, attempt: AttemptId) -> None:
        """Ask for `Sent` once everything asked so far has been written."""
        self._jobs.put((attempt, _Marker.FINISH))

    def cancel(self, attempt: AttemptId) -> None:
        """Write no more of the attempt than the job in hand; `Drained` follows."""
        self._cancelled.add(attempt)
        self._jobs.put((attempt, _Marker.CANCEL))

    def close(self) -> None:
        """Let the thread end after the job in hand; not waited for."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            attempt, work = job
            if isinstance(work, _Marker):
                self._settle(attempt, work)
            elif attempt not in self._cancelled and attempt not in self._failed:
                self._write(attempt, work)
        self._channel.close()

    def _write(self, attempt: AttemptId, ranges: Sequence[Range]) -> None:
        started = time.monotonic()
        try:
            self._channel.write(attempt, ranges)
        except TransferError as error:
            self._failed.add(attempt)
            self._put(SendFailed(attempt, str(error)))
        except Exception as error:  # a bug of ours must fail this attempt, not silence all later ones
            log.exception("the transfer of %s failed", attempt)
            self._failed.add(attempt)
            self._put(SendFailed(attempt, f"{type(error).__name__}: {error}"))
        progress = self._progress.setdefault(attempt, _Progress())
        progress.nbytes += sum(item.nbytes for item in ranges)
        progress.seconds += time.monotonic() - started
        if self._digest is not None:
            progress.digests += map(self._digest, ranges)

    def _settle(self, attempt: AttemptId, marker: _Marker) -> None:
        """The attempt's last marker: CANCEL always comes after FINISH, if both come."""
        progress = self._progress.pop(attempt, _Progress())
        failed = attempt in self._failed
        if marker is _Marker.CANCEL:
            self._cancelled.discard(attempt)
            self._failed.discard(attempt)
            self._put(Drained(attempt))
        elif not failed and attempt not in self._cancelled:
            self._put(Sent(attempt, progress.nbytes, progress.seconds, tuple(progress.digests)))
