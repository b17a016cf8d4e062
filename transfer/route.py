"""One prefill rank's way to all ranks of a decode worker: a reshard and a sender for each that needs its bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import zmq

from pools.layout import PoolLayout
from pools.spec import StateSpec, TpRank
from transfer.errors import MediumUnusable
from transfer.media import open_channel
from transfer.plan import plan_slots, plan_tokens
from transfer.reshard import Reshard
from transfer.sender import Drained, Event, Sender, SendFailed, Sent
from transfer.verify import digests_of
from wire.messages import AttemptId, PeerWelcome


@dataclass
class _Tally:
    sent: list[Sent] = field(default_factory=list)
    drained: int = 0
    failed: bool = False


class Gathering:
    """Makes one event of the `parts` that senders, or ranks, report for an attempt. Called from any thread.

    `Sent` and `Drained` when all have said so; `SendFailed` at the first, once.
    """

    def __init__(self, parts: int, put: Callable[[Event], None]) -> None:
        self._parts = parts
        self._put = put
        self._lock = threading.Lock()
        self._tallies: dict[AttemptId, _Tally] = {}

    def put(self, event: Event) -> None:
        """One part's report."""
        with self._lock:
            tally = self._tallies.setdefault(event.attempt, _Tally())
            whole = self._count(tally, event)
            if isinstance(whole, Sent | Drained):
                del self._tallies[event.attempt]
        if whole is not None:
            self._put(whole)

    def _count(self, tally: _Tally, event: Event) -> Event | None:
        match event:
            case SendFailed():
                first = not tally.failed
                tally.failed = True
                return event if first else None
            case Drained():
                tally.drained += 1
                return event if tally.drained == self._parts else None
            case Sent():
                tally.sent.append(event)
                if len(tally.sent) < self._parts:
                    return None
                return Sent(
                    event.attempt,
                    nbytes=sum(part.nbytes for part in tally.sent),
                    seconds=max(part.seconds for part in tally.sent),
                    digests=tuple(number for part in tally.sent for number in part.digests),
                )


class Route:
    """Where a rank's hand-offs to one decode worker go. The contract is that of `Sender`, in pages and slots."""

    def __init__(self, lanes: list[tuple[Reshard, Sender]], put: Callable[[Event], None]) -> None:
        self._lanes = lanes
        self._put = put

    @classmethod
    def open(
        cls,
        welcome: PeerWelcome,
        context: zmq.Context[zmq.Socket[bytes]],
        spec: StateSpec,
        source: torch.Tensor,
        layout: PoolLayout,
        rank: TpRank,
        put: Callable[[Event], None],
        verify: bool,
    ) -> Route:
        """Connect this rank, whose pools are `source` (uint8, `(nbytes,)`) laid out as `layout`.

        `spec` is that of the whole model; `verify`: make digests of all ranges. Raises MediumUnusable.
        """
        size = len(welcome.reaches)
        wanted = []
        for number, reach in enumerate(welcome.reaches):
            target = target_layout(welcome, spec, TpRank(number, size))
            reshard = Reshard.between(spec, layout, target, rank, TpRank(number, size))
            if not reshard.empty:
                wanted.append((number, reshard, reach))
        gathering = Gathering(len(wanted), put)
        route = cls([], put)
        try:
            for number, reshard, reach in wanted:
                channel = open_channel(welcome.medium, reach, context, source, reshard)
                digests = partial(digests_of, source.numpy(), reshard.target, number) if verify else None
                route._lanes.append((reshard, Sender(channel, gathering.put, welcome.worker, digests)))
        except MediumUnusable:
            route.close()
            raise
        return route

    def send_tokens(
        self, attempt: AttemptId, source_pages: Sequence[int], target_pages: Sequence[int], start: int, stop: int
    ) -> None:
        """Move tokens `start … stop-1`, behind what was asked before. Their memory must stay until the outcome."""
        for reshard, sender in self._lanes:
            sender.write(attempt, plan_tokens(reshard, source_pages, target_pages, start, stop))

    def send_slots(self, attempt: AttemptId, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        """Move the recurrent state, likewise."""
        for reshard, sender in self._lanes:
            sender.write(attempt, plan_slots(reshard, source_slots, target_slots))

    def finish(self, attempt: AttemptId) -> None:
        """Ask for `Sent` once everything asked so far has been written."""
        for _, sender in self._lanes:
            sender.finish(attempt)
        if not self._lanes:  # other ranks have copies of all that this one has
            self._put(Sent(attempt, 0, 0.0))

    def cancel(self, attempt: AttemptId) -> None:
        """Write no more of the attempt than what is in hand; `Drained` follows."""
        for _, sender in self._lanes:
            sender.cancel(attempt)
        if not self._lanes:
            self._put(Drained(attempt))

    def close(self) -> None:
        """Let the senders end."""
        for _, sender in self._lanes:
            sender.close()


def target_layout(welcome: PeerWelcome, spec: StateSpec, rank: TpRank) -> PoolLayout:
    """The pools of one rank of the decode worker. Raises MediumUnusable when such ranks cannot share the state."""
    try:
        local = spec.of_rank(rank.rank, rank.size)
    except ValueError as error:
        raise MediumUnusable(
            f"{welcome.worker} has {rank.size} ranks, which cannot share the state: {error}"
        ) from error
    return PoolLayout.of(local, page_size=welcome.page_size, num_pages=welcome.num_pages, num_slots=welcome.num_slots)
