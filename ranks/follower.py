"""A rank other than the first: does to its pools and its part of the model what the leader says, in that order."""

from __future__ import annotations

import os
from collections.abc import Mapping

import zmq

from models.batch import Chunk
from models.serving import Served
from transfer.errors import TransferError
from transfer.medium import Landing
from transfer.plan import LeasedMemory
from transfer.route import Route
from transfer.sender import Drained, Outcomes, SendFailed, Sent
from transfer.verify import damage
from wire.codec import AnyMessage
from wire.links import DialLink
from wire.messages import Incarnation
from wire.rank_messages import (
    BindRow,
    CancelSend,
    ClearSlots,
    CloseLanding,
    CloseRoute,
    FinishSend,
    Forward,
    LandingClosed,
    LandingOpened,
    LandingVerified,
    OpenLanding,
    OpenRoute,
    RankDrained,
    RankReady,
    RankSendFailed,
    RankSent,
    RouteOpened,
    SendSlots,
    SendTokens,
    VerifyLanding,
    WipeMemory,
)


class Follower:
    """`leader`: where the leader listens. `landings`: the back ends of a decode worker's rank, by name."""

    def __init__(
        self,
        served: Served,
        leader: str,
        context: zmq.Context[zmq.Socket[bytes]],
        landings: Mapping[str, Landing],
    ) -> None:
        self._served = served
        self._storage = served.storage
        self._runner = served.runner()
        self._context = context
        self._landings = landings
        self._routes: dict[Incarnation, Route] = {}
        self._outcomes = Outcomes()
        self._link = DialLink(context, leader)
        self._poller = zmq.Poller()
        self._poller.register(self._link.socket, zmq.POLLIN)
        self._poller.register(self._outcomes, zmq.POLLIN)

    def say_ready(self) -> None:
        """This rank has loaded."""
        reaches = tuple((medium, landing.reach) for medium, landing in self._landings.items())
        self._link.send(RankReady(self._served.rank.rank, os.getpid(), reaches))

    def turn(self, patience_ms: int) -> None:
        """Do what has been said, and report what has become of hand-offs.

        Whatever is raised is the end of this rank, and so of its worker: its pools and the leader's differ.
        """
        self._poller.poll(patience_ms)
        for message in self._link.receive():
            self._on_message(message)
        for event in self._outcomes.take():
            match event:
                case Sent():
                    self._link.send(RankSent(event.attempt, event.nbytes, event.seconds, event.digests))
                case SendFailed():
                    self._link.send(RankSendFailed(event.attempt, event.reason))
                case Drained():
                    self._link.send(RankDrained(event.attempt))

    def close(self) -> None:
        """Close every link and back end."""
        for route in self._routes.values():
            route.close()
        for landing in self._landings.values():
            landing.close()
        self._link.close()

    def _on_message(self, message: AnyMessage) -> None:
        match message:
            case BindRow():
                self._storage.bind(message.row, message.pages, message.slots)
            case ClearSlots():
                self._storage.clear_slots(message.slots)
            case WipeMemory():
                self._storage.wipe(message.pages, message.slots)
            case Forward():
                self._runner.forward([Chunk(item.row, item.token_ids, item.start) for item in message.chunks])
            case OpenRoute():
                self._on_open_route(message)
            case CloseRoute():
                self._routes.pop(message.peer).close()
            case SendTokens():
                self._routes[message.peer].send_tokens(
                    message.attempt, message.source_pages, message.target_pages, message.start, message.stop
                )
            case SendSlots():
                self._routes[message.peer].send_slots(message.attempt, message.source_slots, message.target_slots)
            case FinishSend():
                self._routes[message.peer].finish(message.attempt)
            case CancelSend():
                self._routes[message.peer].cancel(message.attempt)
            case OpenLanding():
                memory = LeasedMemory(self._storage.layout, message.pages, message.slots)
                self._landings[message.medium].open(message.attempt, memory)
                self._link.send(LandingOpened(self._served.rank.rank))
            case CloseLanding():
                arrived = self._landings[message.medium].close_attempt(message.attempt)
                self._link.send(LandingClosed(self._served.rank.rank, arrived))
            case VerifyLanding():
                self._on_verify_landing(message)
            case _:
                raise RuntimeError(f"the leader sent a {type(message).__name__}, which is not for followers")

    def _on_open_route(self, message: OpenRoute) -> None:
        served, error = self._served, ""
        try:
            self._routes[message.peer] = Route.open(
                message.welcome, self._context, served.spec, self._storage.block, self._storage.layout, served.rank,
                self._outcomes.put, message.verify,
            )  # fmt: skip
        except TransferError as problem:
            error = str(problem)
        self._link.send(RouteOpened(served.rank.rank, error))

    def _on_verify_landing(self, message: VerifyLanding) -> None:
        rank = self._served.rank.rank
        found = damage(self._storage.block.numpy(), self._storage.layout, rank, message.digests)
        self._link.send(LandingVerified(rank, f"rank {rank}: {found}" if found else ""))
