"""A prefill worker's links to decode workers: one for each incarnation it was ever told to hand over to.

GREETING ──PeerWelcome──▶ OPEN
    └──────PeerRefused──▶ REFUSED
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from enum import Enum, auto

import zmq

from pools.layout import PoolLayout
from pools.spec import TpRank
from prefill.config import PrefillConfig
from ranks.team import Team, TeamRoute
from transfer.errors import TransferError
from transfer.media import host_id, media_of
from transfer.route import Gathering, target_layout
from wire.codec import AnyMessage
from wire.errors import LinkFull
from wire.links import DialLink
from wire.messages import PROTOCOL_VERSION, Incarnation, Message, PeerHello, PeerRefused, PeerWelcome, PrefillTask

GREET_AGAIN_S = 2.0


class PeerState(Enum):
    """How far the greeting has come."""

    GREETING = auto()
    OPEN = auto()
    REFUSED = auto()


class Peer:
    """One decode worker's incarnation: its link and, once it has welcomed us, its pools and the way there."""

    def __init__(self, worker: str, link: DialLink) -> None:
        self.worker = worker
        self.link = link
        self.state = PeerState.GREETING
        self.refusal = ""
        self.greeted_at = 0.0
        self._route: tuple[PoolLayout, TeamRoute] | None = None

    @property
    def route(self) -> tuple[PoolLayout, TeamRoute]:
        """The layout of the peer's pools (its first rank's) and the way there. Only for an OPEN peer."""
        if self._route is None:
            raise RuntimeError(f"{self.worker} has not welcomed this worker")
        return self._route

    def open(self, layout: PoolLayout, route: TeamRoute) -> None:
        """Hand-offs may begin."""
        self._route = (layout, route)
        self.state = PeerState.OPEN

    def refuse(self, reason: str) -> None:
        """No hand-offs over this link, and why."""
        self.state = PeerState.REFUSED
        self.refusal = f"{self.worker} cannot take hand-offs from this prefill worker: {reason}"

    def send(self, message: Message) -> None:
        """Queue a message. A decode worker that does not read its messages counts as refusing hand-offs."""
        try:
            self.link.send(message)
        except LinkFull as error:
            self.refuse(str(error))

    def close(self) -> None:
        """Let the senders end and close the link."""
        if self._route is not None:
            self._route[1].close()
        self.link.close()


def greeting(config: PrefillConfig, incarnation: Incarnation, team: Team) -> PeerHello:
    """What this worker says first on every link."""
    served = team.served
    return PeerHello(
        protocol=PROTOCOL_VERSION,
        worker=config.name,
        incarnation=incarnation,
        fingerprint=served.fingerprint,
        spec=served.spec,
        page_size=served.plan.page_size,
        media=media_of(config.transfer),
        host=host_id(),
        pids=team.pids,
    )


class Peers:
    """Makes links at their first use and closes those of decode workers that have started anew since.

    `gathering` takes the outcomes of this rank's hand-offs; `verify`: prove what they have moved.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        hello: PeerHello,
        team: Team,
        gathering: Gathering,
        verify: bool,
    ) -> None:
        self._context = context
        self._hello = hello
        self._team = team
        self._gathering = gathering
        self._verify = verify
        self._peers: dict[Incarnation, Peer] = {}

    def get(self, task: PrefillTask, watch: Callable[[object], None], now: float) -> Peer:
        """The link to the task's decode worker; a new one is given to `watch` and says hello."""
        peer = self._peers.get(task.decode_incarnation)
        if peer is None:
            peer = Peer(task.decode_worker, DialLink(self._context, task.decode_endpoint))
            self._peers[task.decode_incarnation] = peer
            watch(peer.link.socket)
            self._greet(peer, now)
        return peer

    def greet_again(self, now: float) -> None:
        """Repeat greetings that have had no answer for a while."""
        for peer in self._peers.values():
            if peer.state is PeerState.GREETING and now - peer.greeted_at > GREET_AGAIN_S:
                self._greet(peer, now)

    def _greet(self, peer: Peer, now: float) -> None:
        peer.greeted_at = now
        peer.send(self._hello)

    def receive(self) -> Iterator[tuple[Peer, AnyMessage]]:
        """What the decode workers have sent."""
        for peer in list(self._peers.values()):
            for message in peer.link.receive():
                yield peer, message

    def on_peer_welcome(self, peer: Peer, welcome: PeerWelcome) -> None:
        """A decode worker takes our hand-offs; if its medium cannot be used after all, that counts as a refusal."""
        if peer.state is not PeerState.GREETING:
            return  # said twice
        try:
            target = target_layout(welcome, self._team.served.spec, TpRank(0, len(welcome.reaches)))
            route = self._team.open_route(welcome, self._context, self._gathering.put, self._verify)
        except TransferError as error:
            peer.refuse(str(error))
        else:
            peer.open(target, route)

    def on_peer_refused(self, peer: Peer, refused: PeerRefused) -> None:
        """A decode worker does not take them; every attempt on this pair will fail with its reason."""
        peer.refuse(refused.reason)

    def close_outdated(self, in_use: Container[Peer], unwatch: Callable[[object], None]) -> None:
        """Close links that no request uses, to workers of which a newer incarnation is known."""
        newest = {peer.worker: incarnation for incarnation, peer in self._peers.items()}
        for incarnation, peer in list(self._peers.items()):
            if newest[peer.worker] != incarnation and peer not in in_use:
                del self._peers[incarnation]
                unwatch(peer.link.socket)
                peer.close()

    def close(self) -> None:
        """Close all."""
        for peer in self._peers.values():
            peer.close()
