"""TCP by ZMQ: frames taken from the source pools without a copy, received by a thread into the decode pools.

    Channel ── [ (attempt, number, [offset, nbytes, …]) | bytes | bytes | … ] ──▶ Landing
            ◀──────────── (number, "" or what went wrong) ──────────────────────

At most `WINDOW` messages are on their way unanswered, so neither side's memory grows with the size of a hand-off.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence

import msgpack
import numpy as np
import zmq

from transfer.errors import OutOfLease, PeerGone, TransferError
from transfer.plan import LeasedMemory, Range
from wire.links import open_socket
from wire.messages import AttemptId

WINDOW = 16
PIECE_BYTES = 1 << 20
_PIECES_A_MESSAGE = 64
_SILENCE_S = 30.0
_POLL_MS = 100

log = logging.getLogger(__name__)


class TcpLanding:
    """Decode side. `block` is the pool memory, uint8, `(nbytes,)`; `endpoint` may end in `:*`."""

    peer_writes = False

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], block: np.ndarray, endpoint: str) -> None:
        self._block = block
        self._socket = open_socket(context, zmq.ROUTER, endpoint)
        self._socket.set(zmq.RCVHWM, 4 * WINDOW)
        self._socket.bind(endpoint)
        self._endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._lock = threading.Lock()
        self._open: dict[str, LeasedMemory] = {}
        self._arrived: dict[str, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tcp-landing", daemon=True)
        self._thread.start()

    @property
    def reach(self) -> str:
        """The endpoint to dial."""
        return self._endpoint

    def open(self, attempt: AttemptId, memory: LeasedMemory) -> None:
        """Accept bytes for this attempt, into this memory only."""
        with self._lock:
            self._open[attempt] = memory
            self._arrived[attempt] = 0

    def close_attempt(self, attempt: AttemptId) -> int | None:
        """Accept no more: a write under way is finished first, later ones are dropped."""
        with self._lock:
            self._open.pop(attempt, None)
            return self._arrived.pop(attempt, None)

    def close(self) -> None:
        """Stop the thread and close the port."""
        self._closing.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            frames = self._socket.recv_multipart(copy=False)
            try:
                number, complaint = self._land([frame.buffer for frame in frames[1:]])
            except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
                log.warning("dropped a malformed transfer message at %s: %r", self._endpoint, error)
                continue
            try:
                self._socket.send_multipart([frames[0].bytes, msgpack.packb([number, complaint])], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                log.warning("a prefill worker has gone in mid-transfer: %s", error)

    def _land(self, frames: list[memoryview]) -> tuple[int, str]:
        """Write one message's bytes; returns its number and the complaint, if any."""
        attempt, number, places = msgpack.unpackb(frames[0], max_ext_len=0, max_array_len=4 * _PIECES_A_MESSAGE)
        if not isinstance(attempt, str) or type(number) is not int or len(places) != 2 * (len(frames) - 1):
            raise ValueError(f"bad header for {len(frames) - 1} pieces")
        with self._lock:
            memory = self._open.get(attempt)
            if memory is None:
                return number, "this attempt is not open"
            try:
                for offset, nbytes, piece in zip(places[::2], places[1::2], frames[1:], strict=True):
                    if nbytes != len(piece):
                        raise ValueError(f"{len(piece)} bytes where {nbytes} were announced")
                    memory.check(offset, nbytes)
                    self._block[offset : offset + nbytes] = np.frombuffer(piece, dtype=np.uint8)
                    self._arrived[attempt] += nbytes
            except OutOfLease as error:
                return number, str(error)
        return number, ""


class TcpChannel:
    """Prefill side. `source` is this worker's pool memory, uint8, `(nbytes,)`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: np.ndarray, reach: str) -> None:
        self._reach = reach
        self._socket = open_socket(context, zmq.DEALER, reach)
        self._socket.set(zmq.SNDHWM, 4 * WINDOW)
        self._socket.connect(reach)
        self._source = source.data
        self._next = 0

    def write(self, attempt: AttemptId, ranges: Sequence[Range]) -> None:
        """Send with a bounded window; returns when the peer has written all of it."""
        unanswered: set[int] = set()
        complaints: list[str] = []
        for pieces in _messages(ranges):
            while len(unanswered) >= WINDOW:
                self._take_answer(unanswered, complaints)
            if complaints:
                break
            unanswered.add(self._next)
            places = [value for piece in pieces for value in (piece.target, piece.nbytes)]
            header = msgpack.packb([attempt, self._next, places])
            views = [self._source[piece.source : piece.source + piece.nbytes] for piece in pieces]
            self._socket.send_multipart([header, *views], copy=False)
            self._next += 1
        while unanswered:
            self._take_answer(unanswered, complaints)
        if complaints:
            raise TransferError(f"the decode worker refused bytes: {complaints[0]}")

    def _take_answer(self, unanswered: set[int], complaints: list[str]) -> None:
        deadline = time.monotonic() + _SILENCE_S
        while not self._socket.poll(_POLL_MS):
            if time.monotonic() > deadline:
                raise PeerGone(f"{self._reach} has not answered for {_SILENCE_S:g} s")
        number, complaint = msgpack.unpackb(self._socket.recv())
        if number not in unanswered:
            return  # of an earlier attempt that was given up
        unanswered.discard(number)
        if complaint:
            complaints.append(complaint)

    def close(self) -> None:
        """Close the connection and drop what waits in it."""
        self._socket.close()


def _messages(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """The ranges cut into pieces, and the pieces gathered into messages, of at most `PIECE_BYTES` each."""
    pieces: list[Range] = []
    room = PIECE_BYTES
    for source, target, nbytes in ranges:
        done = 0
        while done < nbytes:
            step = min(nbytes - done, room)
            pieces.append(Range(source + done, target + done, step))
            done += step
            room -= step
            if not room or len(pieces) == _PIECES_A_MESSAGE:
                yield pieces
                pieces, room = [], PIECE_BYTES
    if pieces:
        yield pieces
