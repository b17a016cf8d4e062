"""The prefill workers that have greeted this decode worker, and the transfer back ends it offers them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from models.serving import Served
from ranks.team import TeamLanding
from transfer.errors import MediumUnusable
from transfer.handshake import mismatch
from transfer.media import choose_medium, host_id
from wire.messages import Incarnation, PeerHello, PeerRefused, PeerWelcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillPeer:
    """A prefill worker's incarnation. `address` is its ZMQ identity here, `landing` the back end it writes by."""

    address: bytes
    worker: str
    incarnation: Incarnation
    landing: TeamLanding
    processes: tuple[tuple[int, float], ...]
    """Process id and start time of each of its ranks, which name them for good."""

    def is_gone(self) -> bool:
        """Whether all of its processes, on this host, have certainly ended: a stopped one may wake up and write."""
        return all(_has_ended(pid, started) for pid, started in self.processes)


def _has_ended(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() != started or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class PrefillPeers:
    """Answers greetings. `landings` are the back ends offered, by name."""

    def __init__(
        self,
        worker: str,
        incarnation: Incarnation,
        served: Served,
        landings: Mapping[str, TeamLanding],
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._served = served
        self._layout = served.storage.layout
        self._landings = landings
        self._peers: dict[bytes, PrefillPeer] = {}

    def get(self, address: bytes) -> PrefillPeer | None:
        """Who sends from this address, if it has been welcomed."""
        return self._peers.get(address)

    def on_peer_hello(self, address: bytes, hello: PeerHello) -> PeerWelcome | PeerRefused:
        """The answer to a greeting."""
        reason = mismatch(hello, self._served.fingerprint, self._served.spec)
        medium = ""
        if reason is None:
            try:
                medium = choose_medium(hello, tuple(self._landings), host_id())
            except MediumUnusable as error:
                reason = str(error)
        if reason is not None:
            log.warning("refused hand-offs from %s: %s", hello.worker, reason)
            return PeerRefused(self._worker, self._incarnation, reason)
        landing = self._landings[medium]
        self._forget_older(hello)
        # Only peers that write here are watched.
        processes = tuple((pid, _started(pid)) for pid in hello.pids) if landing.peer_writes else ()
        self._peers[address] = PrefillPeer(address, hello.worker, hello.incarnation, landing, processes)
        return PeerWelcome(
            worker=self._worker,
            incarnation=self._incarnation,
            page_size=self._layout.page_size,
            num_pages=self._layout.num_pages,
            num_slots=self._layout.num_slots,
            medium=medium,
            reaches=landing.reaches,
        )

    def _forget_older(self, hello: PeerHello) -> None:
        """A worker that has started anew will not speak from its old address again."""
        for address, peer in list(self._peers.items()):
            if peer.worker == hello.worker and peer.incarnation != hello.incarnation:
                del self._peers[address]


def _started(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return -1.0
