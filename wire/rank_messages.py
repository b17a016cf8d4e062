"""Messages between the tensor-parallel ranks of one worker: rank 0, the leader, tells the others what it does itself.

    follower ── RankReady ───────────────────────────────────────────▶ leader    once, when it can serve
    leader ── BindRow, ClearSlots, WipeMemory, Forward ──────────────▶ follower  no answer: the order is all
    leader ── OpenRoute, OpenLanding, CloseLanding, VerifyLanding ───▶ follower  answered by
    follower ── RouteOpened, LandingOpened, LandingClosed, LandingVerified ▶ leader
    leader ── SendTokens, SendSlots, FinishSend, CancelSend ─────────▶ follower  prefill; answered in time by
    follower ── RankSent, RankSendFailed, RankDrained ───────────────▶ leader

All ranks have pools of the same numbers of rows, pages and slots, so a lease means the same on each.
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.messages import AttemptId, Digests, Incarnation, PeerWelcome


@dataclass(frozen=True, slots=True)
class RankReady:
    """Follower → leader: loaded. `reaches`: (medium, how to connect) of its landings, on decode."""

    rank: int
    pid: int
    reaches: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class BindRow:
    """Write a lease into a row's tables."""

    row: int
    pages: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClearSlots:
    """Recurrent state at zero, for a request's first chunk."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WipeMemory:
    """This memory has just become free."""

    pages: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkOfRow:
    """One request's share of a forward step, as `models.batch.Chunk`."""

    row: int
    token_ids: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Run this step, at the same time as all other ranks."""

    chunks: tuple[ChunkOfRow, ...]


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """Connect to the ranks of a decode worker's incarnation, which has sent this welcome."""

    peer: Incarnation
    welcome: PeerWelcome
    verify: bool


@dataclass(frozen=True, slots=True)
class RouteOpened:
    """Done; or in words why not."""

    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class CloseRoute:
    """That decode worker is not needed any more."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class SendTokens:
    """Send this rank's part of tokens `start … stop-1` of an attempt."""

    peer: Incarnation
    attempt: AttemptId
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SendSlots:
    """Send this rank's part of an attempt's recurrent state."""

    peer: Incarnation
    attempt: AttemptId
    source_slots: tuple[int, ...]
    target_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishSend:
    """Answer `RankSent` when all of the attempt that was asked for is at its destination."""

    peer: Incarnation
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class CancelSend:
    """Send no more of the attempt, and answer `RankDrained` when that is certain."""

    peer: Incarnation
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class RankSent:
    """All of this rank's bytes of the attempt have been written."""

    attempt: AttemptId
    nbytes: int
    seconds: float
    digests: Digests


@dataclass(frozen=True, slots=True)
class RankSendFailed:
    """This rank's bytes of the attempt could not be moved."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class RankDrained:
    """This rank writes nothing of the cancelled attempt any more."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class OpenLanding:
    """Accept bytes for this attempt by this medium, into this memory only."""

    medium: str
    attempt: AttemptId
    pages: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LandingOpened:
    """Done."""

    rank: int


@dataclass(frozen=True, slots=True)
class CloseLanding:
    """Accept no more bytes for this attempt."""

    medium: str
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class LandingClosed:
    """Done. `arrived`: bytes, or None where the medium cannot see them."""

    rank: int
    arrived: int | None


@dataclass(frozen=True, slots=True)
class VerifyLanding:
    """Is what has landed what was sent? Each rank looks at the digests that are for it."""

    digests: Digests


@dataclass(frozen=True, slots=True)
class LandingVerified:
    """What differs, in words; empty when nothing does."""

    rank: int
    damage: str


RankMessage = (
    RankReady | BindRow | ClearSlots | WipeMemory | Forward | OpenRoute | RouteOpened | CloseRoute | SendTokens
    | SendSlots | FinishSend | CancelSend | RankSent | RankSendFailed | RankDrained | OpenLanding | LandingOpened
    | CloseLanding | LandingClosed | VerifyLanding | LandingVerified
)  # fmt: skip
