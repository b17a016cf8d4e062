"""Tensor-parallel workers without processes: followers are threads, which meet the leader at barriers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import zmq

from models.serving import Served, ServingConfig, load
from pools.sizing import Phase
from ranks.follower import Follower
from ranks.followers import Followers
from tests.fleet import PATIENCE_S, landings_of
from tests.models.threads import Meeting, ThreadRanks
from transfer.segment import Segment
from wire.links import ListenLink


@dataclass(frozen=True)
class ThreadTeam:
    """A leader's part of the model, its followers, and the memory of its pools where that is shared."""

    served: Served
    followers: Followers | None
    segment: Segment | None


@contextmanager
def thread_team(config: ServingConfig, phase: Phase, transfer: str, folder: Path) -> Iterator[ThreadTeam]:
    """The ranks of one worker; `folder` is for their socket. Must outlive the worker."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    shared = phase is Phase.DECODE and transfer != "tcp"
    meeting = Meeting(config.tp)
    ranks = [
        load_rank(config, phase, ThreadRanks(rank, config.tp, None, meeting), shared) for rank in range(config.tp)
    ]
    if config.tp == 1:
        yield ThreadTeam(ranks[0][0], None, ranks[0][1])
        return
    link = ListenLink(context, f"ipc://{folder}/{phase.value}.ranks")
    stopping, threads = threading.Event(), []
    for served, segment in ranks[1:]:
        landings = landings_of(context, served, segment, transfer) if phase is Phase.DECODE else {}
        follower = Follower(served, link.endpoint, context, landings)
        follower.say_ready()
        threads.append(threading.Thread(target=serve, args=(follower, stopping), daemon=True))
        threads[-1].start()
    followers = Followers(link, len(threads), lambda: None)
    followers.wait_ready(PATIENCE_S)
    try:
        yield ThreadTeam(ranks[0][0], followers, ranks[0][1])
    finally:
        stopping.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        context.destroy(linger=0)


def load_rank(config: ServingConfig, phase: Phase, ranks: ThreadRanks, shared: bool) -> tuple[Served, Segment | None]:
    """One rank's share of model and pools."""
    segments: list[Segment] = []

    def block(nbytes: int) -> torch.Tensor:
        segments.append(Segment.create("test", nbytes))
        return torch.frombuffer(segments[0].memory, dtype=torch.uint8)[:nbytes]

    served = load(config, phase, block if shared else None, ranks)
    return served, segments[0] if segments else None


def serve(follower: Follower, stopping: threading.Event) -> None:
    """A follower's thread."""
    while not stopping.is_set():
        follower.turn(20)
    follower.close()
