"""A worker's connection to the gateway: announce, be welcomed, beat, notice a new gateway.

    DIALLING ──Welcome──▶ WELCOMED ──no Welcome for three heartbeats──▶ DIALLING

The worker says `Hello` every second until it is welcomed, then `Load` once a heartbeat; the gateway answers each
with `Welcome`. A `Welcome` from another incarnation means that the gateway has started anew and knows none of the
attempts this worker holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import zmq

from wire.codec import AnyMessage
from wire.errors import LinkFull
from wire.links import DialLink
from wire.messages import Bye, Hello, Incarnation, Load, Message, Token, Tokens, Welcome

_DIAL_EVERY_S = 1.0
_MISSED_HEARTBEATS = 3

log = logging.getLogger(__name__)


class GatewayLink:
    """`load` is called for each heartbeat; `on_lost` when the gateway has lost all requests that it sent here.

    That is so when another incarnation of it answers, and when it has not read the last ten thousand messages.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        hello: Hello,
        load: Callable[[], Load],
        on_lost: Callable[[], None],
    ) -> None:
        self.on_welcome: Callable[[], None] = lambda: None
        """Called whenever the worker has been taken in."""
        self._link = DialLink(context, endpoint)
        self._hello = hello
        self._load = load
        self._on_lost = on_lost
        self._gateway: Incarnation | None = None
        self._welcomed = False
        self._heartbeat_s = _DIAL_EVERY_S
        self._heard_at = float("-inf")
        self._next_beat = float("-inf")

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For polling."""
        return self._link.socket

    def beat(self, now: float) -> float:
        """Say what is due at `now`; returns the seconds until the next call is needed."""
        if self._welcomed and now - self._heard_at > _MISSED_HEARTBEATS * self._heartbeat_s:
            self._welcomed = False
        if now >= self._next_beat:
            try:
                self._link.send(self._load() if self._welcomed else self._hello)
            except LinkFull:
                self._welcomed = False
            self._next_beat = now + (self._heartbeat_s if self._welcomed else _DIAL_EVERY_S)
        return max(0.0, self._next_beat - now)

    def receive(self, now: float) -> Iterator[AnyMessage]:
        """What the gateway sent, less its `Welcome`s."""
        for message in self._link.receive():
            if isinstance(message, Welcome):
                self._on_welcome(message, now)
            else:
                yield message

    def _on_welcome(self, message: Welcome, now: float) -> None:
        if self._gateway not in (None, message.incarnation):
            self._on_lost()
        self._gateway = message.incarnation
        self._heartbeat_s = message.heartbeat_s
        self._heard_at = now
        if not self._welcomed:
            self._welcomed = True
            self._next_beat = now
            self.on_welcome()

    def send(self, message: Message) -> None:
        """Queue a message for the gateway."""
        try:
            self._link.send(message)
        except LinkFull:
            log.error("the gateway does not read; its requests are dropped")
            self._on_lost()

    def send_tokens(self, tokens: Sequence[Token]) -> None:
        """The tokens of one step, in one message; nothing when there are none."""
        if tokens:
            self.send(Tokens(self._hello.worker, self._hello.incarnation, tuple(tokens)))

    def close(self) -> None:
        """Say goodbye and close; waits at most a second for the goodbye to leave."""
        with suppress(LinkFull):  # a gateway that does not read needs no goodbye
            self._link.send(Bye(self._hello.worker, self._hello.incarnation))
        self._link.socket.close(linger=1000)
