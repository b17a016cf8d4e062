"""The socket that workers dial: messages in, tasks out. It never blocks and nothing that arrives ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import zmq

from gateway.errors import AttemptLost, StartError, from_fault
from gateway.journal import Journal
from gateway.members import Member, Members
from gateway.streams import Streams
from wire.links import ListenLink
from wire.messages import (
    PROTOCOL_VERSION,
    Bye,
    Failed,
    HandedOver,
    Hello,
    Incarnation,
    Load,
    Message,
    Tokens,
    Welcome,
)

log = logging.getLogger(__name__)


class Control:
    """Keeps `members` up to date, feeds `streams`, and ends the attempts of workers that are lost."""

    def __init__(
        self, endpoint: str, heartbeat_s: float, members: Members, journal: Journal, streams: Streams
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._members = members
        self._journal = journal
        self._streams = streams
        self._incarnation = Incarnation(uuid4().hex)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        try:
            self._link = ListenLink(self._context, endpoint)
        except zmq.ZMQError as error:
            self._context.term()
            raise StartError(
                f"cannot listen for workers at {endpoint}: {error}; give another control endpoint"
            ) from error
        self._receivers: Mapping[type, Callable[[bytes, Any], None]] = {
            Hello: self.on_hello,
            Load: self.on_load,
            Bye: self.on_bye,
            Tokens: self.on_tokens,
            Failed: self.on_failed,
            HandedOver: self.on_handed_over,
        }

    async def run(self) -> None:
        """Receive, and watch for silence, until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.socket.fileno(), self._receive)
        try:
            while True:
                self._receive()
                for member in self._members.expire(time.monotonic()):
                    self._lost(member, "has been silent for too long")
                await asyncio.sleep(self._heartbeat_s / 2)
        finally:
            loop.remove_reader(self._link.socket.fileno())
            self._link.close()
            self._context.term()

    def send(self, worker: Member, message: Message) -> bool:
        """Queue a message for a worker. False when it has gone or does not read: it then has to say `Hello` again."""
        sent = self._link.send(worker.peer, message)
        self._look_again()
        if not sent and self._members.forget(worker):
            self._lost(worker, "does not take messages")
        return sent

    def on_hello(self, peer: bytes, hello: Hello) -> None:
        """Take a worker in."""
        if hello.protocol != PROTOCOL_VERSION:
            log.warning(
                "%s worker %r speaks protocol %d, not %d, and is not taken in; run the same version everywhere",
                hello.role.value, hello.worker, hello.protocol, PROTOCOL_VERSION,
            )  # fmt: skip
            return
        if self._members.find(hello.worker, hello.incarnation) is None:
            log.info("%s worker %r has joined (%s)", hello.role.value, hello.worker, hello.model)
        former = self._members.on_hello(hello, peer, time.monotonic())
        if former is not None:
            self._lost(former, "has started anew")
        self._link.send(peer, Welcome(self._incarnation, self._heartbeat_s))

    def on_load(self, peer: bytes, load: Load) -> None:
        """Note and answer a heartbeat. One from a stranger stays unanswered, so that it says `Hello` again."""
        if self._members.on_load(load, peer, time.monotonic()):
            self._link.send(peer, Welcome(self._incarnation, self._heartbeat_s))

    def on_bye(self, _peer: bytes, bye: Bye) -> None:
        """Let a worker go."""
        member = self._members.on_bye(bye)
        if member is not None:
            self._lost(member, "has left")

    def on_tokens(self, _peer: bytes, tokens: Tokens) -> None:
        """Deliver the tokens of a worker's step, unless they are a dead process's last words."""
        if self._members.find(tokens.worker, tokens.incarnation) is not None:
            self._streams.on_tokens(tokens.tokens)

    def on_failed(self, _peer: bytes, failed: Failed) -> None:
        """End an attempt."""
        self._streams.fail(failed.attempt, from_fault(failed.fault, failed.text))

    def on_handed_over(self, _peer: bytes, report: HandedOver) -> None:
        """Note what a hand-off was."""
        if self._members.find(report.worker, report.incarnation) is not None:
            self._journal.on_handed_over(report)

    def _lost(self, member: Member, why: str) -> None:
        log.warning("%s worker %r %s", member.hello.role.value, member.name, why)
        for record in self._journal.held_by(member):
            self._streams.fail(record.attempt, AttemptLost(f"{member.hello.role.value} worker {member.name!r} {why}"))

    def _receive(self) -> None:
        if self._link.socket.closed:
            return
        for peer, message in self._link.receive():
            receiver = self._receivers.get(type(message))
            if receiver is None:
                log.warning("a worker sent %s, which is not for a gateway", type(message).__name__)
            else:
                receiver(peer, message)
        self._look_again()

    def _look_again(self) -> None:
        # The socket's descriptor tells of the first event only: any call on the socket may have swallowed the news.
        if not self._link.socket.closed and self._link.socket.poll(0, zmq.POLLIN):
            asyncio.get_running_loop().call_soon(self._receive)
