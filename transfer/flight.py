"""Messages of bytes on their way to a landing, as both sides of a two-sided medium see them.

    Channel ── (channel, attempt, number, [[offset, nbytes, times, step, …], …]), bytes ──▶ Landing
            ◀──────────────── (attempt, number, "" or what went wrong) ───────────────────

Messages of an attempt are numbered from 0 and written in that order, each once: a repeated one is answered and not
written again; one that comes too early (the one before it was lost) is passed over, and its sender, who hears
nothing, sends all again from the lost one on (go-back-N).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import msgpack
import zmq

from transfer.errors import OutOfLease, PeerGone, TransferError
from transfer.medium import SILENCE_S, never
from transfer.plan import LeasedMemory, Range, Steps, slices
from wire.messages import AttemptId

MAX_PIECES = 256
"""Ranges in one message."""

WINDOW = 4
"""Messages of one channel that are on their way unanswered: neither side's memory grows with a hand-off's size."""

_RESEND_S = 2.0
_POLL_MS = 50


class Piece(NamedTuple):
    """Where one range's bytes belong in the landing's block."""

    offset: int
    nbytes: int
    steps: Steps

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.nbytes * prod(count for count, _ in self.steps)


class Header(NamedTuple):
    """What goes before a message's bytes. `channel` names the sender's connection, whatever carries it."""

    channel: bytes
    attempt: AttemptId
    number: int
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, channel: bytes, attempt: AttemptId, number: int, ranges: Sequence[Range]) -> Header:
        """For these ranges."""
        pieces = tuple(Piece(item.target, item.nbytes, item.target_steps) for item in ranges)
        return cls(channel, attempt, number, pieces)

    def encode(self) -> bytes:
        """As msgpack."""
        places = [[piece.offset, piece.nbytes, *(n for step in piece.steps for n in step)] for piece in self.pieces]
        data: bytes = msgpack.packb([self.channel, self.attempt, self.number, places])
        return data

    @classmethod
    def decode(cls, data: Any) -> Header:
        """Raises ValueError when it is none."""
        try:
            channel, attempt, number, places = msgpack.unpackb(
                data, max_ext_len=0, max_array_len=MAX_PIECES, max_str_len=1024, max_bin_len=64
            )
            if (type(channel), type(attempt), type(number)) != (bytes, str, int):
                raise ValueError("bad types")
            return cls(channel, AttemptId(attempt), number, tuple(map(_piece, places)))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ValueError(f"no header of a transfer message: {error!r}") from error

    @property
    def nbytes(self) -> int:
        """Bytes that follow."""
        return sum(piece.total for piece in self.pieces)


def messages(ranges: Sequence[Range], limit: int) -> Iterator[list[Range]]:
    """The ranges cut and gathered into messages of about `limit` bytes and at most `MAX_PIECES` pieces."""
    for pieces in slices(ranges, limit):
        for start in range(0, len(pieces), MAX_PIECES):
            yield pieces[start : start + MAX_PIECES]


def _piece(place: list[int]) -> Piece:
    offset, nbytes, *steps = place
    if len(steps) % 2 or any(type(number) is not int or number < 0 for number in place):
        raise ValueError(f"bad place {place!r}")
    return Piece(offset, nbytes, tuple(zip(steps[::2], steps[1::2], strict=True)))


class Gate:
    """The landing's open attempts: what may be written where, and what has been."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[AttemptId, LeasedMemory] = {}
        self._arrived: dict[AttemptId, int] = {}
        self._next: dict[AttemptId, dict[bytes, int]] = {}

    def open(self, attempt: AttemptId, memory: LeasedMemory) -> None:
        """Accept messages of this attempt."""
        with self._lock:
            self._open[attempt], self._arrived[attempt], self._next[attempt] = memory, 0, {}

    def close(self, attempt: AttemptId) -> int | None:
        """Accept no more: a write under way is finished first. Returns the bytes that arrived."""
        with self._lock:
            self._open.pop(attempt, None)
            self._next.pop(attempt, None)
            return self._arrived.pop(attempt, None)

    def land(self, header: Header, write: Callable[[], None]) -> bytes | None:
        """Have the message written if it is its turn. Returns the answer; None where silence is the answer."""
        text = self._land(header, write)
        return None if text is None else msgpack.packb([header.attempt, header.number, text])

    def _land(self, header: Header, write: Callable[[], None]) -> str | None:
        with self._lock:
            memory = self._open.get(header.attempt)
            if memory is None:
                return "this attempt is not open"
            expected = self._next[header.attempt].get(header.channel, 0)
            if header.number != expected:
                return "" if header.number < expected else None
            try:
                for piece in header.pieces:
                    memory.check(piece.offset, piece.nbytes, piece.steps)
            except OutOfLease as error:
                return str(error)
            write()
            self._next[header.attempt][header.channel] = expected + 1
            self._arrived[header.attempt] += header.nbytes
            return ""


class Flight:
    """A channel's messages that are not answered yet. `socket` is where headers go and answers come from.

    `resend`: what gets no answer is sent again, for a medium whose bytes travel with their headers.
    """

    def __init__(self, socket: zmq.Socket[bytes], peer: str, resend: bool = True) -> None:
        self._socket = socket
        self._peer = peer
        self._resend = resend
        self._next: dict[AttemptId, int] = {}
        self._unanswered: dict[tuple[AttemptId, int], Sequence[Any]] = {}
        self._complaints: dict[AttemptId, str] = {}
        self._heard = time.monotonic()
        self._resent = 0.0

    def number(self, attempt: AttemptId) -> int:
        """The attempt's next message."""
        return self._next.get(attempt, 0)

    def send(self, attempt: AttemptId, frames: Sequence[Any]) -> None:
        """Put the attempt's next message on its way."""
        number = self.number(attempt)
        self._next[attempt] = number + 1
        if not self._unanswered:
            self._heard = self._resent = time.monotonic()
        self._unanswered[attempt, number] = frames
        self._post(frames)

    def wait_room(self, attempt: AttemptId, cancelled: Callable[[], bool]) -> bool:
        """Wait until one more message may go; False when cancelled meanwhile. Raises TransferError."""
        while len(self._unanswered) >= WINDOW and not cancelled():
            self._take_answers()
        return self._sound(attempt, cancelled)

    def wait(self, attempt: AttemptId, cancelled: Callable[[], bool] = never) -> None:
        """Wait until all of the attempt's messages are answered. Raises TransferError."""
        while any(key[0] == attempt for key in self._unanswered) and not cancelled():
            self._take_answers()
        self._sound(attempt, cancelled)

    def _sound(self, attempt: AttemptId, cancelled: Callable[[], bool]) -> bool:
        if complaint := self._complaints.get(attempt):
            raise TransferError(f"the decode worker refused bytes: {complaint}")
        return not cancelled()

    def forget(self, attempt: AttemptId) -> None:
        """Nothing of the attempt is sent again or waited for."""
        self._next.pop(attempt, None)
        self._complaints.pop(attempt, None)
        for key in [key for key in self._unanswered if key[0] == attempt]:
            del self._unanswered[key]

    def _take_answers(self) -> None:
        """What has come within a moment; after a longer silence, send again what has no answer.

        Raises PeerGone when the silence lasts: then no message is on its way any more.
        """
        if self._socket.poll(_POLL_MS):
            self._heard = self._resent = time.monotonic()
            self._on_answer(self._socket.recv())
            return
        now = time.monotonic()
        if now - self._heard > SILENCE_S:
            self._unanswered.clear()
            raise PeerGone(f"{self._peer} has not answered for {SILENCE_S:g} s")
        if self._resend and now - self._resent > _RESEND_S:
            self._resent = now
            for frames in self._unanswered.values():
                self._post(frames)

    def _post(self, frames: Sequence[Any]) -> None:
        with suppress(zmq.Again):  # nobody takes them; they will be sent again
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)

    def _on_answer(self, data: bytes) -> None:
        attempt, number, complaint = msgpack.unpackb(data, max_ext_len=0, max_array_len=3)
        # Whatever is not unanswered has been given up, or was answered before.
        if self._unanswered.pop((attempt, number), None) is not None and complaint:
            self._complaints.setdefault(attempt, complaint)
