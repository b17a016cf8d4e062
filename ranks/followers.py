"""The leader's link to the other ranks of its worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import zmq

from ranks.errors import RankLostError
from wire.codec import AnyMessage
from wire.links import ListenLink
from wire.rank_messages import LandingClosed, LandingOpened, LandingVerified, RankReady, RouteOpened

Reply = TypeVar("Reply", RankReady, RouteOpened, LandingOpened, LandingClosed, LandingVerified)

_POLL_MS = 100
_ANSWER_S = 30.0


class Followers:
    """Ranks 1 to `count`, which dial `link`. `check` raises RankLostError when one of their processes has ended."""

    def __init__(self, link: ListenLink, count: int, check: Callable[[], None]) -> None:
        self._link = link
        self._count = count
        self._check = check
        self._peers: list[bytes] = []
        self._unasked: list[AnyMessage] = []
        self.ready: Sequence[RankReady] = ()
        """What the ranks said when they had loaded, in their order; after `wait_ready`."""

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For polling."""
        return self._link.socket

    def wait_ready(self, patience_s: float) -> None:
        """Until every rank has loaded. Raises RankLostError."""
        ready: dict[int, tuple[bytes, RankReady]] = {}
        deadline = time.monotonic() + patience_s
        while len(ready) < self._count:
            self._wait(deadline, "load the model")
            for peer, message in self._link.receive():
                if isinstance(message, RankReady):
                    ready[message.rank] = (peer, message)
        self._peers = [ready[rank][0] for rank in sorted(ready)]
        self.ready = tuple(ready[rank][1] for rank in sorted(ready))

    def send(self, message: AnyMessage) -> None:
        """Tell all ranks. Raises RankLostError when one does not take it."""
        for rank, peer in enumerate(self._peers, start=1):
            if not self._link.send(peer, message):
                raise RankLostError(f"rank {rank} does not take messages")

    def call(self, message: AnyMessage, kind: type[Reply]) -> list[Reply]:
        """Tell all ranks and wait for their answers, in the order of ranks. Raises RankLostError."""
        self.send(message)
        answers: dict[int, Reply] = {}
        deadline = time.monotonic() + _ANSWER_S
        while len(answers) < self._count:
            self._wait(deadline, f"answer {type(message).__name__}")
            for _, answer in self._link.receive():
                if isinstance(answer, kind):
                    answers[answer.rank] = answer
                else:
                    self._unasked.append(answer)
        return [answers[rank] for rank in sorted(answers)]

    def receive(self) -> list[AnyMessage]:
        """What ranks have said unasked. Raises RankLostError when one has ended."""
        self._check()
        messages = [*self._unasked, *(message for _, message in self._link.receive())]
        self._unasked = []
        return messages

    def close(self) -> None:
        """Close the link."""
        self._link.close()

    def _wait(self, deadline: float, what: str) -> None:
        while not self._link.socket.poll(_POLL_MS):
            self._check()
            if time.monotonic() > deadline:
                raise RankLostError(f"a rank did not {what} in time")
