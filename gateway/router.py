"""Which workers serve a request. Pure: members and loads in, a pair out.

A prefill and a decode worker form a pair when they serve the same weights (fingerprint) and agree on what a
request's state is (spec digest). A colocated worker is a pair of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.members import Member
from wire.messages import Role


@dataclass(frozen=True, slots=True)
class Pair:
    """Who serves an attempt. `decode` is None when `prefill` is a colocated worker, which does both."""

    prefill: Member
    decode: Member | None

    @property
    def workers(self) -> tuple[Member, ...]:
        """The one or two workers."""
        return (self.prefill,) if self.decode is None else (self.prefill, self.decode)

    @property
    def max_prompt(self) -> int:
        """The longest prompt in tokens: prefill has to hold it."""
        return self.prefill.hello.capacity.max_request_tokens

    @property
    def max_total(self) -> int:
        """The longest prompt plus answer in tokens: whoever decodes has to hold them."""
        return (self.decode or self.prefill).hello.capacity.max_request_tokens


def pairs(members: Iterable[Member]) -> list[Pair]:
    """All pairs that can serve."""
    by_role: dict[Role, list[Member]] = {role: [] for role in Role}
    for member in members:
        by_role[member.hello.role].append(member)
    split = [
        Pair(prefill, decode)
        for prefill in by_role[Role.PREFILL]
        for decode in by_role[Role.DECODE]
        if _match(prefill, decode)
    ]
    return split + [Pair(colocated, None) for colocated in by_role[Role.COLOCATED]]


def why_unready(members: Iterable[Member]) -> str | None:
    """What keeps requests from being served, for people; None when a pair is there."""
    members = list(members)
    if pairs(members):
        return None
    roles = {member.hello.role for member in members}
    missing = [role.value for role in (Role.PREFILL, Role.DECODE) if role not in roles]
    if missing:
        return f"no {' and no '.join(missing)} worker has joined"
    return (
        "no prefill worker serves the same model and state spec as a decode worker: see fingerprint and spec_digest"
    )


def choose(
    ready: Iterable[Pair], prompt: int, total: int, open_requests: Mapping[str, int], tried: Pair | None = None
) -> Pair | None:
    """The least loaded pair that can hold `prompt` and `total` tokens; None when none can, ever.

    `open_requests`: what this gateway itself has given to each worker, which `Load` only shows a heartbeat later.
    `tried`: the pair that has just failed the request, which is taken again only where there is no other.
    """
    failed = {worker.incarnation for worker in tried.workers} if tried else set()

    def cost(pair: Pair) -> tuple[bool, float, float, tuple[str, ...]]:
        busy = [_busy(worker, open_requests) for worker in pair.workers]
        again = {worker.incarnation for worker in pair.workers} == failed
        return again, max(busy), sum(busy) / len(busy), tuple(worker.name for worker in pair.workers)

    fitting = [pair for pair in ready if prompt <= pair.max_prompt and total <= pair.max_total]
    return min(fitting, key=cost, default=None)


def _match(prefill: Member, decode: Member) -> bool:
    ours, theirs = prefill.hello, decode.hello
    return (ours.fingerprint, ours.spec_digest) == (theirs.fingerprint, theirs.spec_digest)


def _busy(worker: Member, open_requests: Mapping[str, int]) -> float:
    """Requests given and reported, as a share of what may run at once."""
    reported = worker.load.waiting + worker.load.running if worker.load is not None else 0
    return (open_requests.get(worker.name, 0) + reported) / max(1, worker.hello.capacity.max_running_requests)
