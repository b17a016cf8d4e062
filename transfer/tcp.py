"""TCP by ZMQ: frames taken from the source pools without a copy, received by a thread into the decode pools."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np
import zmq

from transfer.copying import gathered, view
from transfer.flight import WINDOW, Flight, Gate, Header, messages
from transfer.medium import never
from transfer.plan import LeasedMemory, Range
from wire.links import open_socket
from wire.messages import AttemptId

PIECE_BYTES = 4 << 20
_BUFFER_BYTES = 4 << 20
_POLL_MS = 100

log = logging.getLogger(__name__)


def unusable() -> str | None:
    """TCP is everywhere."""
    return None


class TcpLanding:
    """Decode side. `block` is the pool memory, uint8, `(nbytes,)`; `endpoint` may end in `:*`."""

    peer_writes = False

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], block: np.ndarray, endpoint: str) -> None:
        self._block = block
        self._socket = open_socket(context, zmq.ROUTER, endpoint)
        self._socket.set(zmq.RCVHWM, 4 * WINDOW)
        self._socket.set(zmq.RCVBUF, _BUFFER_BYTES)
        self._socket.bind(endpoint)
        self._endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._gate = Gate()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tcp-landing", daemon=True)
        self._thread.start()

    @property
    def reach(self) -> str:
        """The endpoint to dial."""
        return self._endpoint

    def open(self, attempt: AttemptId, memory: LeasedMemory) -> None:
        """Accept bytes for this attempt, into this memory only."""
        self._gate.open(attempt, memory)

    def close_attempt(self, attempt: AttemptId) -> int | None:
        """Accept no more: a write under way is finished first, later ones are dropped."""
        return self._gate.close(attempt)

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
                answer = self._land([frame.buffer for frame in frames[1:]])
            except ValueError as error:
                log.warning("dropped a malformed transfer message at %s: %s", self._endpoint, error)
                continue
            if answer is None:
                continue
            try:
                self._socket.send_multipart([frames[0].bytes, answer], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                log.warning("a prefill worker has gone in mid-transfer: %s", error)

    def _land(self, frames: Sequence[memoryview]) -> bytes | None:
        if not frames:
            raise ValueError("no header")
        header, payload = Header.decode(frames[0]), frames[1:]
        sizes = [piece.total for piece in header.pieces]
        if sizes != [len(frame) for frame in payload]:
            raise ValueError(f"frames of {[len(frame) for frame in payload]} bytes where {sizes} were announced")

        def write() -> None:
            for piece, frame in zip(header.pieces, payload, strict=True):
                there = view(self._block, piece.offset, piece.nbytes, piece.steps)
                there[...] = np.frombuffer(frame, np.uint8).reshape(there.shape)

        return self._gate.land(header, write)


class TcpChannel:
    """Prefill side. `source` is this worker's pool memory, uint8, `(nbytes,)`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: np.ndarray, reach: str) -> None:
        self._name = secrets.token_bytes(8)
        self._socket = open_socket(context, zmq.DEALER, reach)
        self._socket.set(zmq.SNDHWM, 4 * WINDOW)
        self._socket.set(zmq.SNDBUF, _BUFFER_BYTES)
        self._socket.connect(reach)
        self._flight = Flight(self._socket, reach)
        self._source = source

    def write(self, attempt: AttemptId, ranges: Sequence[Range], cancelled: Callable[[], bool] = never) -> None:
        """Send as far as the window allows, and wait for it to move on."""
        for pieces in messages(ranges, PIECE_BYTES):
            if not self._flight.wait_room(attempt, cancelled):
                return
            header = Header.of(self._name, attempt, self._flight.number(attempt), pieces)
            self._flight.send(attempt, [header.encode(), *(gathered(self._source, piece).data for piece in pieces)])

    def wait(self, attempt: AttemptId, cancelled: Callable[[], bool] = never) -> None:
        """Until the peer has answered for all."""
        self._flight.wait(attempt, cancelled)

    def abandon(self, attempt: AttemptId) -> None:
        """What is on its way will find the attempt closed."""
        self._flight.forget(attempt)

    def close(self) -> None:
        """Close the connection and drop what waits in it."""
        self._socket.close()
