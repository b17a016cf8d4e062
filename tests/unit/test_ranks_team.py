"""The leader's side of a team, with a follower that says nothing by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from pools.lease import Lease
from pools.sizing import Phase
from ranks.followers import Followers
from ranks.team import Team
from tests.fleet import Decoders, config_of
from tests.tiny import make_checkpoint
from transfer.plan import LeasedMemory
from wire.messages import AttemptId
from wire.rank_messages import LandingClosed, LandingOpened, OpenLanding, RankReady, WipeMemory

LEASE = Lease("one/0", 1, (3, 4), (2,))
ONE = AttemptId("one/0")


@dataclass
class Heard:
    """Stands for `Followers` of one rank: what it was told, in order, and whether the leader waited for an answer."""

    ready: tuple[RankReady, ...] = (RankReady(1, 4711, (("shm", "there"), ("tcp", "there"))),)
    told: list[tuple[str, bool]] = field(default_factory=list)

    def send(self, message: object) -> None:
        self.told.append((type(message).__name__, False))

    def call(self, message: object, kind: Callable[..., Any]) -> list[Any]:
        self.told.append((type(message).__name__, True))
        return [kind(1)] if kind is LandingOpened else [LandingClosed(1, None)]


@dataclass
class Ground:
    """A landing that does nothing."""

    peer_writes: bool
    reach: str = "here"

    def open(self, attempt: AttemptId, memory: LeasedMemory) -> None: ...

    def close_attempt(self, attempt: AttemptId) -> int | None:
        return None

    def close(self) -> None: ...


@pytest.mark.parametrize("peer_writes", [True, False])
def test_memory_is_not_announced_before_followers_are_done_with_it(tmp_path: Path, peer_writes: bool) -> None:
    """A wipe is not waited for; so whoever may write there next has to wait for the answer to something after it."""
    served, _ = Decoders().served(config_of(make_checkpoint("qwen3_5_text", tmp_path)), Phase.DECODE, shared=False)
    heard = Heard()
    team = Team(served, cast(Followers, heard))
    landing = team.landing("shm", Ground(peer_writes))
    assert landing.reaches == ("here", "there")
    team.wipe(LEASE)
    landing.open(ONE, LEASE)
    assert heard.told == [(WipeMemory.__name__, False), (OpenLanding.__name__, True)]
    assert landing.close_attempt(ONE) is None
