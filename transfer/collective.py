"""torch.distributed point to point: Gloo between CPUs, NCCL between GPUs, in the same code.

Each pair of a prefill rank and a decode rank has a process group of its own, made when they meet on the decode rank's
TCPStore, so that pairs come and go without touching each other. Headers and answers go by ZMQ, as with `tcp`; the
bytes behind each header by the group, from device to device.

    Channel ── join ──▶ door            a thread for each pair, with its socket:
            ── header ──▶ lane ── answer ──▶ Channel
            ══ bytes ═══▶ lane

A landing receives into a buffer of its own and places the bytes while it is open to their attempt: so a writer that
stalls in mid-message never holds anyone's memory.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import zmq
from torch._C import _distributed_c10d as c10d

from transfer.errors import MediumUnusable, PeerGone
from transfer.flight import WINDOW, Flight, Gate, Header, messages
from transfer.medium import SILENCE_S, never
from transfer.plan import LeasedMemory, Range, Steps
from wire.links import open_socket
from wire.messages import AttemptId

PIECE_BYTES = 8 << 20
_JOIN_S = 10.0
_POLL_MS = 100
_BUFFERS = 3
_NAME_BYTES = 16
_DECODE, _PREFILL = 0, 1
_LEAVE_S = 1.0

log = logging.getLogger(__name__)


def unusable() -> str | None:
    """Why this torch has no point-to-point back end; None when it has."""
    if not dist.is_available() or not dist.is_gloo_available():
        return "this torch was built without torch.distributed's Gloo back end"
    return None


@dataclass(frozen=True, slots=True)
class _Reach:
    """Where a decode rank's door and store are."""

    door: str
    host: str
    store_port: int

    def to_json(self) -> str:
        return json.dumps([self.door, self.host, self.store_port])

    @classmethod
    def from_json(cls, text: str) -> _Reach:
        try:
            door, host, port = json.loads(text)
            return cls(str(door), str(host), int(port))
        except (ValueError, TypeError) as error:
            raise MediumUnusable(f"the peer's process group is described by {text[:200]!r}") from error


class _Group(Protocol):
    """What both back ends of torch have."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> c10d.Work: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> c10d.Work: ...
    def abort(self) -> None: ...


def _group(store: c10d.Store, rank: int, host: str, device: torch.device) -> _Group:
    """A process group of the two that meet at `store`, for memory of this device; `host` is this side's address."""
    timeout = timedelta(seconds=SILENCE_S)
    if device.type == "cuda":
        nccl = c10d.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return cast(_Group, c10d.ProcessGroupNCCL(store, rank, 2, nccl))
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return cast(_Group, gloo(store, rank, 2, options))


def _view(block: torch.Tensor, offset: int, nbytes: int, steps: Steps) -> torch.Tensor:
    """As `transfer.copying.view`, on any device."""
    shape, strides = (*(times for times, _ in steps), nbytes), (*(step for _, step in steps), 1)
    return block.as_strided(shape, strides, block.storage_offset() + offset)


def _payload(block: torch.Tensor, pieces: Sequence[Range], stage: torch.Tensor) -> torch.Tensor:
    """What the pieces move, end to end: a view of the block if it is one stretch, else gathered in `stage`."""
    found = [_view(block, piece.source, piece.nbytes, piece.source_steps).reshape(-1) for piece in pieces]
    if len(found) == 1:
        return found[0]
    return torch.cat(found, out=stage[: sum(len(part) for part in found)])


class CollectiveLanding:
    """Decode side. `block` is the pool memory, uint8, `(nbytes,)`; `endpoint` (tcp) may end in `:*`."""

    peer_writes = False

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], block: torch.Tensor, endpoint: str) -> None:
        self._context = context
        self._block = block
        self._gate = Gate()
        self._closing = threading.Event()
        self._host = _host_of(endpoint)
        self._door = open_socket(context, zmq.ROUTER, endpoint)
        self._door.bind(endpoint)
        self._store = c10d.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._reach = _Reach(self._door.get_string(zmq.LAST_ENDPOINT), self._host, self._store.port)
        self._lanes: list[_Lane] = []
        self._thread = threading.Thread(target=self._run, name="collective-door", daemon=True)
        self._thread.start()

    @property
    def reach(self) -> str:
        """Door and store."""
        return self._reach.to_json()

    def open(self, attempt: AttemptId, memory: LeasedMemory) -> None:
        """Accept bytes for this attempt, into this memory only."""
        self._gate.open(attempt, memory)

    def close_attempt(self, attempt: AttemptId) -> int | None:
        """Accept no more: a placement under way is finished first, later bytes are dropped."""
        return self._gate.close(attempt)

    def close(self) -> None:
        """End the door and all lanes."""
        self._closing.set()
        self._thread.join()
        for lane in self._lanes:
            lane.thread.join(_LEAVE_S)  # one whose peer stalls in mid-message leaves later
        self._door.close()

    def _run(self) -> None:
        anywhere = self._reach.door.rpartition(":")[0] + ":*"
        while not self._closing.is_set():
            if not self._door.poll(_POLL_MS):
                continue
            address, *frames = self._door.recv_multipart()
            if len(frames) != 1 or len(frames[0]) != _NAME_BYTES:
                log.warning("dropped a malformed request to join at %s", self._reach.door)
                continue
            socket = open_socket(self._context, zmq.ROUTER, anywhere)
            socket.bind(anywhere)
            endpoint = socket.get_string(zmq.LAST_ENDPOINT)
            store = c10d.PrefixStore(frames[0].hex(), self._store)
            join = partial(_group, store, _DECODE, self._host, self._block.device)
            lane = _Lane(socket, join, self._land, self._closing, self._block.device)
            self._lanes = [*(lane for lane in self._lanes if lane.thread.is_alive()), lane]
            with suppress(zmq.ZMQError):  # gone already; its lane will find out
                self._door.send_multipart([address, endpoint.encode()], zmq.DONTWAIT)

    def _land(self, header: Header, received: torch.Tensor) -> bytes | None:
        def write() -> None:
            at = 0
            for piece in header.pieces:
                there = _view(self._block, piece.offset, piece.nbytes, piece.steps)
                there.copy_(received[at : at + piece.total].view(there.shape))
                at += piece.total

        return self._gate.land(header, write)


class _Lane:
    """The decode side of one pair: a thread that ends when its peer leaves or its group breaks.

    `land` places a message's bytes and makes the answer.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        join: Callable[[], _Group],
        land: Callable[[Header, torch.Tensor], bytes | None],
        closing: threading.Event,
        device: torch.device,
    ) -> None:
        self._socket = socket
        self._join = join
        self._land = land
        self._closing = closing
        self._device = device
        self._receiving: deque[tuple[bytes, Header, torch.Tensor, c10d.Work]] = deque()
        self.thread = threading.Thread(target=self._run, name="collective-lane", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            group = self._join()
            buffers = torch.empty(_BUFFERS, PIECE_BYTES, dtype=torch.uint8, device=self._device)
            count = 0
            while not (self._closing.is_set() or monitor.poll(0)):
                if len(self._receiving) < _BUFFERS and self._socket.poll(0 if self._receiving else _POLL_MS):
                    self._receive(group, buffers[count % _BUFFERS], count)
                    count += 1
                elif self._receiving:
                    self._finish()
        except (RuntimeError, ValueError) as error:  # RuntimeError is what torch.distributed raises
            log.warning("a prefill rank's process group is broken: %s", str(error).split("\n")[0])
        finally:
            self._socket.disable_monitor()
            self._socket.close()

    def _receive(self, group: _Group, buffer: torch.Tensor, count: int) -> None:
        """Take a header, and begin to receive what is behind it."""
        address, data = self._socket.recv_multipart()
        header = Header.decode(data)
        if header.nbytes > len(buffer):
            raise ValueError(f"a message of {header.nbytes} bytes is over the limit of {len(buffer)}")
        buffer = buffer[: header.nbytes]
        self._receiving.append((address, header, buffer, group.recv([buffer], _PREFILL, count)))

    def _finish(self) -> None:
        """Wait for the oldest message's bytes, place them and answer."""
        address, header, buffer, work = self._receiving.popleft()
        work.wait()
        answer = self._land(header, buffer)
        if answer is None:
            raise ValueError("a message was lost on the way")
        with suppress(zmq.ZMQError):  # gone
            self._socket.send_multipart([address, answer], zmq.DONTWAIT)


class CollectiveChannel:
    """Prefill side. `source` is this worker's pool memory, uint8, `(nbytes,)`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: torch.Tensor, reach: str) -> None:
        self._context = context
        self._source = source
        self._reach = _Reach.from_json(reach)
        self._pair: _Pair | None = None

    def write(self, attempt: AttemptId, ranges: Sequence[Range], cancelled: Callable[[], bool] = never) -> None:
        """Send as far as the window allows; meets the peer first if they have not met, or if their group broke."""
        if self._pair is None:
            self._pair = _Pair(self._context, self._reach, self._source.device)
        try:
            for pieces in messages(ranges, PIECE_BYTES):
                if not self._pair.flight.wait_room(attempt, cancelled):
                    return
                self._pair.send(attempt, pieces, self._source)
        except PeerGone:
            self._part()
            raise

    def wait(self, attempt: AttemptId, cancelled: Callable[[], bool] = never) -> None:
        """Until the peer has answered for all."""
        if self._pair is None:
            return
        try:
            self._pair.flight.wait(attempt, cancelled)
        except PeerGone:
            self._part()
            raise

    def abandon(self, attempt: AttemptId) -> None:
        """What is on its way will find the attempt closed."""
        if self._pair is not None:
            self._pair.flight.forget(attempt)

    def close(self) -> None:
        """Leave the group."""
        self._part()

    def _part(self) -> None:
        if self._pair is not None:
            self._pair.close()
            self._pair = None


class _Pair:
    """The prefill side of one pair. Raises PeerGone when the two cannot meet."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], reach: _Reach, device: torch.device) -> None:
        name = secrets.token_bytes(_NAME_BYTES)
        self._name = name
        self._count = 0
        # Used in turns: whatever is unanswered still has its own.
        self._stages = torch.empty(WINDOW + 1, PIECE_BYTES, dtype=torch.uint8, device=device)
        self._sending: deque[tuple[c10d.Work, torch.Tensor]] = deque()
        door = open_socket(context, zmq.DEALER, reach.door)
        door.connect(reach.door)
        door.send(name)
        try:
            if not door.poll(int(_JOIN_S * 1000)):
                raise PeerGone(f"{reach.door} has not answered for {_JOIN_S:g} s")
            lane = door.recv().decode()
        finally:
            door.close()
        self._socket = open_socket(context, zmq.DEALER, lane)
        self._socket.connect(lane)
        self.flight = Flight(self._socket, lane, resend=False)
        try:
            store = c10d.TCPStore(reach.host, reach.store_port, is_master=False, timeout=timedelta(seconds=_JOIN_S))
            self._group = _group(c10d.PrefixStore(name.hex(), store), _PREFILL, _own_address(reach), device)
        except RuntimeError as error:
            self._socket.close()
            raise PeerGone(f"cannot form a process group with {reach.host}: {error}") from error

    def send(self, attempt: AttemptId, pieces: Sequence[Range], source: torch.Tensor) -> None:
        """The header, and the bytes behind it: straight out of the pools where they are one stretch."""
        header = Header.of(self._name, attempt, self.flight.number(attempt), pieces)
        payload = _payload(source, pieces, self._stages[self._count % len(self._stages)])
        self.flight.send(attempt, [header.encode()])
        try:
            self._sending.append((self._group.send([payload], _DECODE, self._count), payload))
        except RuntimeError as error:
            raise PeerGone(f"the process group is broken: {error}") from error
        self._count += 1
        while len(self._sending) > WINDOW:  # answered, so sent; what must be alive until then is let go
            self._sending.popleft()

    def close(self) -> None:
        """Leave the group and drop what waits."""
        self._group.abort()
        self._socket.close()


def _host_of(endpoint: str) -> str:
    """The address in a tcp endpoint."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _own_address(reach: _Reach) -> str:
    """The address of this host from which it reaches the peer's."""
    family, _, _, _, address = socket.getaddrinfo(reach.host, reach.store_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
