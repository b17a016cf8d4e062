"""A request on the decode side, from the gateway's task to its last token.

    QUEUED ──memory for the asked──▶ RESERVED ──Landed──▶ READY ──a place in the batch──▶ RUNNING ──finish──▶ DONE
       └────────────────────────────────┴── cancel, deadline, fault ──┴──────────────────────┴──▶ ABORTED | FAILED

    state     holds          who may write it       ends by
    QUEUED    nothing        –                      Ask and memory, deadline
    RESERVED  its lease      prefill                Landed, deadline
    READY     its lease      decode                 a free place among the running, deadline
    RUNNING   its lease      decode                 its last token, deadline

A lease that ends in RESERVED is fenced until prefill is quiet, where prefill writes this memory itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from decode.peers import PrefillPeer
from pools.lease import Lease
from pools.prefix import chain_of
from transfer.handoff import ALLOWED as HANDOFF_TABLE
from transfer.handoff import HandoffState
from wire.life import Life
from wire.messages import AttemptId, DecodeTask


class DecodeState(Enum):
    """Where a request stands on the decode side."""

    QUEUED = auto()
    RESERVED = auto()
    READY = auto()
    RUNNING = auto()
    DONE = auto()
    ABORTED = auto()
    FAILED = auto()


_S = DecodeState
_ENDS = frozenset({_S.ABORTED, _S.FAILED})
ALLOWED: dict[DecodeState, frozenset[DecodeState]] = {
    _S.QUEUED: frozenset({_S.RESERVED}) | _ENDS,
    _S.RESERVED: frozenset({_S.READY}) | _ENDS,
    _S.READY: frozenset({_S.RUNNING}) | _ENDS,
    _S.RUNNING: frozenset({_S.DONE}) | _ENDS,
    _S.DONE: frozenset(),
    _S.ABORTED: frozenset(),
    _S.FAILED: frozenset(),
}


@dataclass(eq=False, slots=True)
class DecodeRequest:
    """`peer` is who asked for memory for it, once someone has. `chain` names the whole pages of the task's tokens.

    `tokens` are those sampled in this attempt, prefill's first one included; `overtaken` counts requests behind it
    that got memory before it did.
    """

    task: DecodeTask
    chain: tuple[bytes, ...]
    deadline: float
    life: Life[DecodeState]
    handoff: Life[HandoffState]
    peer: PrefillPeer | None = None
    lease: Lease | None = None
    overtaken: int = 0
    aborted_at: float = 0.0
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, task: DecodeTask, page_size: int, now: float) -> DecodeRequest:
        """A request that has just been announced; `page_size` is that of this worker, 0 to share no pages."""
        return cls(
            task=task,
            chain=chain_of(task.token_ids, page_size) if page_size else (),
            deadline=now + task.deadline_s,
            life=Life(ALLOWED, DecodeState.QUEUED, now),
            handoff=Life(HANDOFF_TABLE, HandoffState.WAITING, now),
        )

    @property
    def attempt(self) -> AttemptId:
        """Its id."""
        return self.task.attempt

    @property
    def state(self) -> DecodeState:
        """Where it stands."""
        return self.life.state

    @property
    def held(self) -> Lease:
        """Its memory. Only for a request that has been reserved for."""
        if self.lease is None:
            raise RuntimeError(f"{self.attempt} is {self.state.name} and has no lease")
        return self.lease

    @property
    def prompt_tokens(self) -> int:
        """Tokens that prefill computes: the prompt's, and those of earlier attempts."""
        return len(self.task.token_ids)

    @property
    def index(self) -> int:
        """The index, in the whole answer, of the next token."""
        return self.task.generated + len(self.tokens)

    @property
    def stored_tokens(self) -> int:
        """Tokens in its cache: all but the newest, which the next step stores."""
        return self.prompt_tokens + len(self.tokens) - 1

    @property
    def needed_tokens(self) -> int:
        """Tokens that its lease must hold in the end: the newest token of the answer is never stored."""
        return self.prompt_tokens + self.task.sampling.max_tokens - self.task.generated - 1

    def stored_chain(self, page_size: int) -> tuple[bytes, ...]:
        """Names of the whole pages whose content is final."""
        return chain_of((*self.task.token_ids, *self.tokens[:-1]), page_size, self.chain)
