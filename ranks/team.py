"""All ranks of a worker as one, from the leader's side: what it does to its own memory and model, every rank does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import zmq

from models.batch import Chunk
from models.serving import Served
from pools.lease import Lease
from ranks.errors import RankLostError
from ranks.followers import Followers
from transfer.errors import MediumUnusable
from transfer.medium import Landing
from transfer.plan import LeasedMemory
from transfer.route import Gathering, Route
from transfer.sender import Drained, Event, SendFailed, Sent
from transfer.verify import damage
from wire.messages import AttemptId, Digests, Incarnation, PeerWelcome
from wire.rank_messages import (
    BindRow,
    CancelSend,
    ChunkOfRow,
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
    RankSendFailed,
    RankSent,
    RouteOpened,
    SendSlots,
    SendTokens,
    VerifyLanding,
    WipeMemory,
)


class Team:
    """The leader's model and pools, and its followers'. Without followers, a worker of one process."""

    def __init__(self, served: Served, followers: Followers | None = None) -> None:
        self.served = served
        self.followers = followers
        self._runner = served.runner()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.served.rank.size

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of all ranks."""
        others = self.followers.ready if self.followers else ()
        return (os.getpid(), *(ready.pid for ready in others))

    def bind(self, lease: Lease) -> None:
        """A request has memory: fill its row's tables."""
        self.served.storage.bind(lease.row, lease.token_pages, lease.slots)
        self._tell(BindRow(lease.row, lease.token_pages, lease.slots))

    def clear(self, lease: Lease) -> None:
        """Before a request's first chunk: its recurrent state at zero."""
        self.served.storage.clear_slots(lease.slots)
        self._tell(ClearSlots(lease.slots))

    def wipe(self, lease: Lease) -> None:
        """The lease's memory has become free, or had been kept of another request until now."""
        self.served.storage.wipe(lease.pages, lease.slots)
        if self.served.storage.poison:
            self._tell(WipeMemory(lease.pages, lease.slots))

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """One step, see `models.runner`. Raises ValueError for chunks that no rank has run, RankLostError."""
        if self.followers is None:
            return self._runner.forward(chunks)
        self._runner.check(chunks)
        self._tell(Forward(tuple(ChunkOfRow(chunk.row, chunk.token_ids, chunk.start) for chunk in chunks)))
        try:
            return self._runner.forward(chunks)
        except Exception as error:  # whatever it is, the ranks no longer agree on what has been computed
            raise RankLostError(f"a step failed on rank 0: {error}") from error

    def landing(self, medium: str, landing: Landing) -> TeamLanding:
        """A transfer back end of every rank, as one."""
        return TeamLanding(medium, landing, self)

    def open_route(
        self,
        welcome: PeerWelcome,
        context: zmq.Context[zmq.Socket[bytes]],
        put: Callable[[Event], None],
        verify: bool,
    ) -> TeamRoute:
        """Connect every rank to a decode worker's. `put` takes this rank's outcomes; `verify`: with digests.

        Raises MediumUnusable.
        """
        served = self.served
        storage = served.storage
        route = Route.open(welcome, context, served.spec, storage.block, storage.layout, served.rank, put, verify)
        if self.followers is not None:
            answers = self.followers.call(OpenRoute(welcome.incarnation, welcome, verify), RouteOpened)
            if errors := [answer.error for answer in answers if answer.error]:
                route.close()
                raise MediumUnusable(errors[0])
        return TeamRoute(welcome.incarnation, route, self)

    def gathering(self, put: Callable[[Event], None]) -> Gathering:
        """Makes one outcome of all ranks' for each hand-off."""
        return Gathering(self.size, put)

    def outcomes(self) -> list[Event]:
        """What followers have reported of hand-offs. Raises RankLostError."""
        messages = self.followers.receive() if self.followers else []
        events: list[Event] = []
        for message in messages:
            match message:
                case RankSent():
                    events.append(Sent(message.attempt, message.nbytes, message.seconds, message.digests))
                case RankSendFailed():
                    events.append(SendFailed(message.attempt, message.reason))
                case RankDrained():
                    events.append(Drained(message.attempt))
        return events

    def close(self) -> None:
        """Close the link to the followers, who leave with their leader."""
        if self.followers is not None:
            self.followers.close()

    def _tell(self, message: BindRow | ClearSlots | WipeMemory | Forward) -> None:
        if self.followers is not None:
            self.followers.send(message)


class TeamRoute:
    """`transfer.route.Route` for all ranks."""

    def __init__(self, peer: Incarnation, route: Route, team: Team) -> None:
        self._peer = peer
        self._route = route
        self._followers = team.followers

    def send_tokens(
        self, attempt: AttemptId, source_pages: tuple[int, ...], target_pages: tuple[int, ...], start: int, stop: int
    ) -> None:
        """Move tokens `start … stop-1`."""
        self._route.send_tokens(attempt, source_pages, target_pages, start, stop)
        if self._followers is not None:
            self._followers.send(SendTokens(self._peer, attempt, source_pages, target_pages, start, stop))

    def send_slots(self, attempt: AttemptId, source_slots: tuple[int, ...], target_slots: tuple[int, ...]) -> None:
        """Move the recurrent state."""
        self._route.send_slots(attempt, source_slots, target_slots)
        if self._followers is not None:
            self._followers.send(SendSlots(self._peer, attempt, source_slots, target_slots))

    def finish(self, attempt: AttemptId) -> None:
        """Ask for `Sent`."""
        self._route.finish(attempt)
        if self._followers is not None:
            self._followers.send(FinishSend(self._peer, attempt))

    def cancel(self, attempt: AttemptId) -> None:
        """Ask for `Drained`."""
        self._route.cancel(attempt)
        if self._followers is not None:
            self._followers.send(CancelSend(self._peer, attempt))

    def close(self) -> None:
        """Let all senders end."""
        self._route.close()
        if self._followers is not None:
            self._followers.send(CloseRoute(self._peer))


class TeamLanding:
    """One transfer back end on all ranks of a decode worker."""

    def __init__(self, medium: str, landing: Landing, team: Team) -> None:
        self._medium = medium
        self._landing = landing
        self._team = team
        self._storage = team.served.storage
        others = team.followers.ready if team.followers else ()
        self.reaches = (landing.reach, *(dict(ready.reaches)[medium] for ready in others))
        self.peer_writes = landing.peer_writes

    def open(self, attempt: AttemptId, lease: Lease) -> None:
        """Accept bytes for this attempt, on all ranks, into its lease only.

        The answers also say that followers are done with all that was said before. Until then this memory may not be
        given to a peer that writes it by itself: a follower could still be wiping what its former owner left.
        """
        self._landing.open(attempt, LeasedMemory(self._storage.layout, lease.pages, lease.slots))
        if self._team.followers is not None:
            opened = OpenLanding(self._medium, attempt, lease.pages, lease.slots)
            self._team.followers.call(opened, LandingOpened)

    def close_attempt(self, attempt: AttemptId) -> int | None:
        """Accept no more; returns the bytes that arrived on all ranks, or None when the medium cannot see them."""
        arrived = [self._landing.close_attempt(attempt)]
        if self._team.followers is not None:
            answers = self._team.followers.call(CloseLanding(self._medium, attempt), LandingClosed)
            arrived += [answer.arrived for answer in answers]
        return None if None in arrived else sum(nbytes for nbytes in arrived if nbytes is not None)

    def damage(self, digests: Digests) -> str | None:
        """What has not landed as it was sent, in words; None when all has."""
        found = damage(self._storage.block.numpy(), self._storage.layout, 0, digests)
        if found or self._team.followers is None or not digests:
            return found
        answers = self._team.followers.call(VerifyLanding(digests), LandingVerified)
        return next((answer.damage for answer in answers if answer.damage), None)

    def close(self) -> None:
        """Stop for good, on this rank."""
        self._landing.close()
