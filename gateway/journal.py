"""What is open: one record for each prompt being answered, enough to start its next attempt from.

The journal also counts how many attempts each worker holds; routing asks for that.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.errors import QueueFull
from gateway.members import Member
from gateway.router import Pair
from wire.messages import AttemptId, HandedOver, Sampling, Token

_RECENT = 256


@dataclass(slots=True)
class Record:
    """A prompt, the answer's tokens so far, and who works on it.

    `index`: the prompt's place in the HTTP request. `deadline`: seconds, monotonic. `holders`: the workers that still
    have a part of the attempt to do. `begun_with`: how many tokens earlier attempts have brought. `failures`: the
    attempts that were lost and count. `finished_at`: the index of the token that ended the answer. `handoffs`: what
    decode has reported of each hand-off, the latest attempt's last.
    """

    response_id: str
    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    deadline: float
    tokens: list[int] = field(default_factory=list)
    attempts: int = 0
    begun_with: int = 0
    failures: int = 0
    pair: Pair | None = None
    holders: set[str] = field(default_factory=set)
    finished_at: int | None = None
    handoffs: list[HandedOver] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose state decode still held, so that it did not have to move."""
        return min(self.handoffs[0].cached_tokens, len(self.prompt)) if self.handoffs else 0

    @property
    def request_id(self) -> str:
        """Unique over all requests."""
        return f"{self.response_id}-{self.index}"

    @property
    def attempt(self) -> AttemptId:
        """The id of the latest attempt."""
        return AttemptId(f"{self.request_id}/{self.attempts}")


class Journal:
    """The open records by request id, at most `limit`, and the last few that have been closed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.recent: deque[Record] = deque(maxlen=_RECENT)
        self._records: dict[str, Record] = {}
        self._open: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    @property
    def open_requests(self) -> Mapping[str, int]:
        """How many attempts each worker holds, by its name."""
        return self._open

    def open(self, record: Record) -> None:
        """Enter a record. Raises QueueFull at the limit."""
        if len(self._records) >= self._limit:
            raise QueueFull(f"{self._limit} requests are open, which is the limit (max_queue); try again later")
        self._records[record.request_id] = record

    def assign(self, record: Record, pair: Pair) -> None:
        """Begin the record's next attempt, with this pair."""
        self._release(record, *record.holders)
        record.attempts += 1
        record.begun_with = len(record.tokens)
        record.pair = pair
        record.holders = {worker.name for worker in pair.workers}
        self._open.update(record.holders)

    def write(self, record: Record, tokens: Sequence[Token]) -> None:
        """Note tokens that go to the client."""
        if record.pair is not None and record.pair.decode is not None:
            self._release(record, record.pair.prefill.name)  # its part is done with the first token
        record.tokens.extend(token.token_id for token in tokens)
        if tokens[-1].finish is not None:
            record.finished_at = tokens[-1].index

    def on_handed_over(self, report: HandedOver) -> None:
        """Note a hand-off of an open record's latest attempt."""
        record = self._records.get(report.attempt.rpartition("/")[0])
        if record is not None and record.attempt == report.attempt:
            record.handoffs.append(report)

    def is_open(self, record: Record) -> bool:
        """Whether somebody waits for it."""
        return record.request_id in self._records

    def close(self, record: Record) -> bool:
        """Strike a record out. False when it was not open."""
        if self._records.pop(record.request_id, None) is None:
            return False
        self._release(record, *record.holders)
        self.recent.append(record)
        return True

    def held_by(self, worker: Member) -> list[Record]:
        """The records whose attempt needs this incarnation of a worker."""
        return [record for record in self._records.values() if _needs(record, worker)]

    def _release(self, record: Record, *workers: str) -> None:
        for worker in workers:
            if worker in record.holders:
                record.holders.discard(worker)
                self._open[worker] -= 1


def _needs(record: Record, worker: Member) -> bool:
    """Prefill is needed until decode has given a token: before that, the hand-off may be under way."""
    if record.pair is None:
        return False
    handed_over = record.pair.decode is not None and len(record.tokens) > record.begun_with + 1
    needed = record.pair.workers[1:] if handed_over else record.pair.workers
    return any((item.name, item.incarnation) == (worker.name, worker.incarnation) for item in needed)
