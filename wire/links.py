"""The ZMQ sockets that messages travel on. Every send is immediate: a full queue is an error, never a silent wait.

`DialLink` is the side that connects (a worker to the gateway, prefill to decode); `ListenLink` is the side that
binds and tells its peers apart by their ZMQ identity.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import zmq

from wire.codec import MAX_MESSAGE_BYTES, AnyMessage, decode, encode
from wire.errors import BadMessage, LinkFull

QUEUED_MESSAGES = 10_000
"""Bound on the messages that wait in either direction of one link."""

_RECEIVED_AT_ONCE = 1_000

log = logging.getLogger(__name__)


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    """A bounded socket for `endpoint` (not yet bound or connected) that never delays its process's end."""
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, QUEUED_MESSAGES)
    socket.set(zmq.RCVHWM, QUEUED_MESSAGES)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.set(zmq.IPV6, int("[" in endpoint))
    return socket


class DialLink:
    """A connection to one listening peer."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.endpoint = endpoint
        self.socket = open_socket(context, zmq.DEALER, endpoint)
        self.socket.connect(endpoint)

    def send(self, message: AnyMessage) -> None:
        """Queue the message. Raises LinkFull when the peer has not read the last ten thousand."""
        try:
            self.socket.send(encode(message), zmq.DONTWAIT)
        except zmq.Again as error:
            raise LinkFull(f"{self.endpoint} does not take messages") from error

    def receive(self) -> Iterator[AnyMessage]:
        """The messages that have arrived; bytes that are no message are logged and dropped."""
        for _ in range(_RECEIVED_AT_ONCE):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            message = _decoded(frames[-1], self.endpoint)
            if message is not None:
                yield message

    def close(self) -> None:
        """Close the socket and drop what waits in it."""
        self.socket.close()


class ListenLink:
    """A bound socket with any number of peers. `endpoint` may end in `:*`; `self.endpoint` is the real one."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = open_socket(context, zmq.ROUTER, endpoint)
        # Without it, messages to a peer that has gone vanish without a word.
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)

    def send(self, peer: bytes, message: AnyMessage) -> bool:
        """Queue the message for a peer. False when the peer has gone or does not read: it will learn by deadline."""
        try:
            self.socket.send_multipart([peer, encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            log.warning("could not send %s: %s", type(message).__name__, error)
            return False
        return True

    def receive(self) -> Iterator[tuple[bytes, AnyMessage]]:
        """(peer, message) for all that has arrived; bytes that are no message are logged and dropped."""
        for _ in range(_RECEIVED_AT_ONCE):
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            message = _decoded(frames[-1], self.endpoint) if len(frames) > 1 else None
            if message is not None:
                yield frames[0], message

    def close(self) -> None:
        """Close the socket and drop what waits in it."""
        self.socket.close()


def _decoded(data: bytes, where: str) -> AnyMessage | None:
    try:
        return decode(data)
    except BadMessage as error:
        log.warning("dropped %d bytes that arrived at %s: %s", len(data), where, error)
        return None
