"""Who waits for which tokens: from the workers' messages to the task that answers a client.

    on_tokens ──▶ Stream (one attempt: puts in order, drops what it has seen) ──▶ Inbox (one client) ──▶ take()

The first token comes from prefill and the later ones from decode, which may overtake it. Nothing here waits but
`Inbox.take`, and nothing grows past the attempt's `max_tokens`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gateway.errors import ApiError
from gateway.journal import Record
from wire.messages import AttemptId, Token


class Inbox:
    """What has come for one client; filled by its streams and emptied by the one task that answers it."""

    def __init__(self) -> None:
        self._ready: list[Stream] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, stream: Stream) -> None:
        """This stream has something new."""
        self._ready.append(stream)
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End the whole request: the next `take` raises `error`. The first call counts."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[Stream]:
        """The streams with something new, at least one, each once. Raises what `fail` was called with."""
        while not self._ready and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        ready, self._ready = self._ready, []
        return ready

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Stream:
    """One attempt's tokens: in the order of their index, each once, until the one that finishes."""

    def __init__(self, record: Record, inbox: Inbox) -> None:
        self.record = record
        self._inbox = inbox
        self._next = record.begun_with
        self._limit = record.sampling.max_tokens
        self._early: dict[int, Token] = {}
        self._ready: list[Token] = []
        self._error: ApiError | None = None
        self._ended = False

    def on_token(self, token: Token) -> None:
        """Take in a token, whichever worker it came from."""
        if self._ended or not self._next <= token.index < self._limit:
            return
        self._early.setdefault(token.index, token)
        idle = not self._ready
        while not self._ended and (following := self._early.pop(self._next, None)) is not None:
            self._ready.append(following)
            self._next += 1
            self._ended = following.finish is not None
        if idle and self._ready:
            self._inbox.put(self)

    def fail(self, error: ApiError) -> None:
        """End the attempt, unless it has ended; tokens that have come in order still go out first."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        if not self._ready:
            self._inbox.put(self)

    def take(self) -> list[Token]:
        """The tokens that are next, at least one. Raises the attempt's error when there are none."""
        if not self._ready and self._error is not None:
            raise self._error
        ready, self._ready = self._ready, []
        if self._error is not None:
            self._inbox.put(self)
        return ready


class Streams:
    """The streams by attempt. What comes for an attempt that nobody waits for is dropped."""

    def __init__(self) -> None:
        self._by_attempt: dict[AttemptId, Stream] = {}

    def open(self, record: Record, inbox: Inbox) -> None:
        """Expect the tokens of the record's latest attempt."""
        self._by_attempt[record.attempt] = Stream(record, inbox)

    def close(self, attempt: AttemptId) -> None:
        """Expect nothing more."""
        self._by_attempt.pop(attempt, None)

    def on_tokens(self, tokens: Iterable[Token]) -> None:
        """Deliver one worker's step."""
        for token in tokens:
            stream = self._by_attempt.get(token.attempt)
            if stream is not None:
                stream.on_token(token)

    def fail(self, attempt: AttemptId, error: ApiError) -> None:
        """End an attempt with an error."""
        stream = self._by_attempt.get(attempt)
        if stream is not None:
            stream.fail(error)

    def fail_all(self, error: ApiError) -> None:
        """End every attempt with an error."""
        for stream in self._by_attempt.values():
            stream.fail(error)
