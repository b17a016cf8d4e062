"""Every message between Tandem's processes.

    gateway ── PrefillTask, Cancel ──▶ prefill worker ── Tokens(first), Failed ──▶ gateway
    gateway ── DecodeTask,  Cancel ──▶ decode worker  ── Tokens, Failed ─────────▶ gateway
    worker  ── Hello, Load, Bye ─────▶ gateway        ── Welcome ────────────────▶ worker

    prefill ── PeerHello ─▶ decode      decode ── PeerWelcome | PeerRefused ─▶ prefill     once per link
    prefill ── Ask ───────▶ decode      decode ── Reserved ──────────────────▶ prefill     per hand-off
    prefill ── Landed ────▶ decode      decode ── Taken ─────────────────────▶ prefill
    prefill ── Quiet ─────▶ decode      decode ── Abort ─────────────────────▶ prefill     when it ends early
                                        decode ── HandedOver ────────────────▶ gateway     the report of it

Each is a frozen dataclass; `wire.codec` turns it into msgpack and back and checks types. The handler of message
`Reserved` is a method `on_reserved`. Ids: an *attempt* is one try at serving a request; an *incarnation* is one
start of one process, and whatever belongs to an older one is dropped.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from enum import Enum
from typing import NewType

from pools.spec import StateSpec
from wire.capacity import Capacity

PROTOCOL_VERSION = 1

AttemptId = NewType("AttemptId", str)
Incarnation = NewType("Incarnation", str)


class Role(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Finish(Enum):
    """Why a request ended well."""

    STOP = "stop"
    LENGTH = "length"


class Fault(Enum):
    """Whose fault a failure is: the request's (never tried again), nobody's (no room by the deadline), or ours.

    `LEAVING` is no fault at all: the worker gives the request back, to be served by another.
    """

    REQUEST = "request"
    NO_ROOM = "no_room"
    OURS = "ours"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens, and when to stop.

    `temperature` 0 is greedy; `top_k` 0 is no limit; `logprobs` is how many alternatives to report with each token
    (0: the chosen token's only; None: no log-probabilities at all). The draw depends on (seed, position) alone.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    logprobs: int | None

    def finish(self, token_id: int, index: int) -> Finish | None:
        """Whether the answer ends with this token, the `index`-th (from 0), and why."""
        if token_id in self.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if index + 1 >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker → gateway, first on every connection: who I am and what I serve.

    `peer_endpoint` is where prefill workers reach a decode worker (empty for the other roles).
    """

    protocol: int
    worker: str
    incarnation: Incarnation
    role: Role
    model: str
    fingerprint: str
    spec_digest: str
    peer_endpoint: str
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Welcome:
    """Gateway → worker: taken in; send `Load` at least every `heartbeat_s` seconds."""

    incarnation: Incarnation
    heartbeat_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Worker → gateway, the heartbeat: how busy I am.

    `handoffs` counts those finished since start, `damaged_handoffs` those whose bytes were not what was sent.
    `fenced`: leases of ended requests that a peer may still write to. `oldest_s`: the age of the oldest request.
    """

    worker: str
    incarnation: Incarnation
    waiting: int
    running: int
    free_rows: int
    free_pages: int
    free_slots: int
    handoffs: int
    handoff_bytes: int
    damaged_handoffs: int
    fenced: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class Bye:
    """Worker → gateway: I am leaving; what I still hold is lost."""

    worker: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """Gateway → prefill or colocated worker: compute these tokens; hand off to that decode worker.

    The last `generated` of `token_ids` belong to the answer already: an earlier attempt got so far. The three
    `decode_*` fields are empty for a colocated worker, which decodes itself. `deadline_s`: seconds left.
    """

    attempt: AttemptId
    token_ids: tuple[int, ...]
    generated: int
    sampling: Sampling
    deadline_s: float
    decode_worker: str
    decode_incarnation: Incarnation
    decode_endpoint: str


@dataclass(frozen=True, slots=True)
class DecodeTask:
    """Gateway → decode worker: expect this request from that prefill worker, then decode it.

    `token_ids` and `generated` are those of the `PrefillTask`.
    """

    attempt: AttemptId
    token_ids: tuple[int, ...]
    generated: int
    sampling: Sampling
    deadline_s: float
    prefill_worker: str
    prefill_incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Cancel:
    """Gateway → workers: nobody waits for this attempt any more. Unknown attempts are ignored."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token. `index` counts the answer's tokens from 0. `top`: (token id, log-probability) pairs."""

    attempt: AttemptId
    index: int
    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Worker → gateway: all tokens of one step, in one message."""

    worker: str
    incarnation: Incarnation
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """Worker → gateway: this attempt is over, without an answer. `text` is for the client."""

    attempt: AttemptId
    fault: Fault
    text: str


@dataclass(frozen=True, slots=True)
class PeerHello:
    """Prefill → decode, first on every link: may I hand requests over to you?

    `media`: transfer back ends I can use, best first. `host` is equal for processes that can share memory; there,
    `pids`, one for each tensor-parallel rank, let the other side confirm that these processes are gone.
    """

    protocol: int
    worker: str
    incarnation: Incarnation
    fingerprint: str
    spec: StateSpec
    page_size: int
    media: tuple[str, ...]
    host: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerWelcome:
    """Decode → prefill: yes, by this medium.

    `reaches` say how to connect to each tensor-parallel rank (their meaning is the medium's).
    """

    worker: str
    incarnation: Incarnation
    page_size: int
    num_pages: int
    num_slots: int
    medium: str
    reaches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """Decode → prefill: no; `reason` names what differs."""

    worker: str
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Prefill → decode: this attempt is next to be computed; reserve memory for it."""

    attempt: AttemptId
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Decode → prefill: a lease is taken; write to these pages (in token order) and slots.

    The first `held_tokens` tokens are there already, in pages that must not be written.
    """

    attempt: AttemptId
    pages: tuple[int, ...]
    slots: tuple[int, ...]
    held_tokens: int


Digests = tuple[int, ...]
"""Hashes of what a hand-off moved, six numbers each, see `transfer.verify.Digest`."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Prefill → decode: every byte of the state has been written.

    `first_token` was sampled by prefill and already sent to the gateway. `wire_s`: for how long bytes were moving;
    `unhidden_s`: how much of that came after the last chunk was computed. `digests`, where prefill verifies
    transfers, are of all that was written. `checksum` is over the other fields; make one with `sealed`.
    """

    attempt: AttemptId
    incarnation: Incarnation
    prompt_tokens: int
    first_token: int
    nbytes: int
    wire_s: float
    unhidden_s: float
    digests: Digests
    checksum: int = 0

    def sealed(self) -> Landed:
        """The record with its checksum."""
        fields = tuple(getattr(self, name) for name in self.__slots__ if name != "checksum")
        return replace(self, checksum=zlib.crc32(repr(fields).encode()))

    @property
    def intact(self) -> bool:
        """Whether the checksum fits the fields."""
        return self == self.sealed()


@dataclass(frozen=True, slots=True)
class Taken:
    """Decode → prefill: the hand-off is complete; prefill may release its lease."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Decode → gateway, before the attempt's next token: what the hand-off was, in bytes, tokens and seconds.

    `cached_tokens` were here already and did not move.
    """

    worker: str
    incarnation: Incarnation
    attempt: AttemptId
    nbytes: int
    cached_tokens: int
    wire_s: float
    unhidden_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Decode → prefill: this hand-off is over; stop writing, then say `Quiet`."""

    attempt: AttemptId
    why: str


@dataclass(frozen=True, slots=True)
class Quiet:
    """Prefill → decode: this hand-off is over and I shall not write to its memory again.

    The answer to `Abort`, and what prefill says unasked when a request ends on its side (cancelled, failed, or
    answered by its first token).
    """

    attempt: AttemptId


Message = (
    Hello | Welcome | Load | Bye | PrefillTask | DecodeTask | Cancel | Tokens | Failed
    | HandedOver | PeerHello | PeerWelcome | PeerRefused | Ask | Reserved | Landed | Taken | Abort | Quiet
)  # fmt: skip
