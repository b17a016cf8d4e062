"""A request on the prefill side, from its task to decode's acknowledgement.

    QUEUED ──Reserved──▶ MATCHED ──lease here──▶ RUNNING ──last chunk──▶ SENDING ──Taken──▶ DONE
       │                    │                       │  (first token ends it: ABORTED)  │
       └────────────────────┴───────── cancel, deadline, fault ────────────────────────┴──▶ ABORTED | FAILED

    state     holds here    holds on decode   ends by
    QUEUED    nothing       nothing           Reserved, deadline
    MATCHED   nothing       its lease         memory here, deadline
    RUNNING   its lease     its lease         the last chunk, deadline
    SENDING   its lease     its lease         Taken, deadline

From an ended request the lease is released once its sender is drained, and then decode is told `Quiet`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from pools.lease import Lease
from prefill.peers import Peer
from transfer.handoff import ALLOWED as HANDOFF_TABLE
from transfer.handoff import HandoffState
from wire.life import Life
from wire.messages import AttemptId, Message, PrefillTask

SAY_AGAIN_S = 2.0


class PrefillState(Enum):
    """Where a request stands on the prefill side."""

    QUEUED = auto()
    MATCHED = auto()
    RUNNING = auto()
    SENDING = auto()
    DONE = auto()
    ABORTED = auto()
    FAILED = auto()


_S = PrefillState
_ENDS = frozenset({_S.ABORTED, _S.FAILED})
ALLOWED: dict[PrefillState, frozenset[PrefillState]] = {
    _S.QUEUED: frozenset({_S.MATCHED}) | _ENDS,
    _S.MATCHED: frozenset({_S.RUNNING}) | _ENDS,
    _S.RUNNING: frozenset({_S.SENDING}) | _ENDS,
    _S.SENDING: frozenset({_S.DONE}) | _ENDS,
    _S.DONE: frozenset(),
    _S.ABORTED: frozenset(),
    _S.FAILED: frozenset(),
}


@dataclass(eq=False, slots=True)
class PrefillRequest:
    """`computed` and `sent` count prompt tokens; `pages` and `slots` are decode's, in token order.

    `computed_at`: when the last chunk was done. `unanswered`: what decode has been told and must answer.
    """

    task: PrefillTask
    peer: Peer
    deadline: float
    life: Life[PrefillState]
    handoff: Life[HandoffState]
    unanswered: Message | None = None
    said_at: float = 0.0
    lease: Lease | None = None
    pages: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    computed: int = 0
    sent: int = 0
    first_token: int = -1
    computed_at: float = 0.0

    @classmethod
    def start(cls, task: PrefillTask, peer: Peer, now: float) -> PrefillRequest:
        """A request that has just arrived."""
        return cls(
            task=task,
            peer=peer,
            deadline=now + task.deadline_s,
            life=Life(ALLOWED, PrefillState.QUEUED, now),
            handoff=Life(HANDOFF_TABLE, HandoffState.WAITING, now),
        )

    @property
    def asked(self) -> bool:
        """Whether decode knows of it."""
        return self.said_at > 0

    def say(self, message: Message, now: float) -> None:
        """Tell decode what it must answer; `say_again` repeats it until then."""
        self.peer.send(message)
        self.unanswered, self.said_at = message, now

    def say_again(self, now: float) -> None:
        """Repeat what has had no answer for a while: a message can be lost with its connection."""
        if self.unanswered is not None and now - self.said_at > SAY_AGAIN_S:
            self.say(self.unanswered, now)

    @property
    def attempt(self) -> AttemptId:
        """Its id."""
        return self.task.attempt

    @property
    def state(self) -> PrefillState:
        """Where it stands."""
        return self.life.state

    @property
    def held(self) -> Lease:
        """Its memory here. Only for a running or sending request."""
        if self.lease is None:
            raise RuntimeError(f"{self.attempt} is {self.state.name} and has no lease")
        return self.lease

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.task.token_ids)

    @property
    def remaining(self) -> int:
        """Prompt tokens still to be computed."""
        return self.prompt_tokens - self.computed
