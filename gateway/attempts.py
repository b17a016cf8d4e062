"""Serving records: which workers to ask, when to tell them to stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from gateway.config import RetryLimits
from gateway.errors import Aborted, AttemptLost, BadRequest, NoRoom
from gateway.journal import Journal, Record
from gateway.members import Member, Members
from gateway.router import Pair, choose, pairs, why_unready
from gateway.streams import Inbox, Streams
from wire.messages import Cancel, DecodeTask, Incarnation, Message, PrefillTask, Token

Send = Callable[[Member, Message], bool]

_LOOK_AGAIN_S = 0.1

log = logging.getLogger(__name__)


class Attempts:
    """Starts and ends attempts: in the journal, in the streams and at the workers.

    A lost attempt is replayed: the next one begins with the prompt and the tokens so far, on any pair. Draws depend
    on (seed, position) alone, so it goes on as the lost one would have.
    """

    def __init__(self, members: Members, journal: Journal, streams: Streams, send: Send, limits: RetryLimits) -> None:
        self._retries = limits.retries
        self._patience_s = limits.patience_s
        self._members = members
        self._journal = journal
        self._streams = streams
        self._send = send
        self._inboxes: dict[str, Inbox] = {}
        """By the id of each open record."""
        self._closing: NoRoom | None = None

    def close(self) -> None:
        """End all that is open and begin nothing more."""
        self._closing = NoRoom("the gateway is stopping; try again later")
        self._streams.fail_all(self._closing)

    def max_tokens(self, prompt: int, max_context: int | None, wanted: int | None) -> int:
        """How many tokens may answer a prompt of so many; `wanted` None is as many as fit.

        Raises NoRoom when nobody is ready, and BadRequest when prompt and answer are too long for the model or for
        every ready pair.
        """
        ready = self._ready()
        total = prompt + (wanted or 1)
        longest_prompt = max(pair.max_prompt for pair in ready)
        longest = max((pair.max_total for pair in ready if prompt <= pair.max_prompt), default=0)
        if max_context is not None and total > max_context:
            raise _too_long(prompt, wanted, "the model's context", max_context)
        if prompt > longest_prompt:
            raise _too_long(prompt, wanted, "the longest prompt that a prefill worker can hold", longest_prompt)
        if total > longest:
            raise _too_long(prompt, wanted, "what a decode worker can hold", longest)
        return wanted or min(longest, max_context or longest) - prompt

    def open(self, record: Record, inbox: Inbox) -> None:
        """Enter a record and start its first attempt. Raises QueueFull or NoRoom."""
        self._journal.open(record)
        self._inboxes[record.request_id] = inbox
        self._start(record, inbox)

    def abort(self, response_id: str) -> bool:
        """End a request on somebody's demand. False when it is not open."""
        found = [inbox for id_, inbox in self._inboxes.items() if id_.rpartition("-")[0] == response_id]
        for inbox in found:
            inbox.fail(Aborted(f"request {response_id} was aborted", code="aborted"))
        return bool(found)

    def replay(self, record: Record, inbox: Inbox, lost: AttemptLost) -> None:
        """Begin the next attempt where the lost one stood, now or when a pair is there again.

        Raises NoRoom when the record has lost too many.
        """
        record.failures += lost.counts
        if record.failures > self._retries:
            raise NoRoom(f"{record.failures} attempts have failed, the last because {lost.text}", code=lost.code)
        log.warning("replaying %s from token %d: %s", record.request_id, len(record.tokens), lost.text)
        self._stop(record)
        self._start_soon(record, inbox, lost, time.monotonic() + self._patience_s)

    def _start_soon(self, record: Record, inbox: Inbox, lost: AttemptLost, until: float) -> None:
        """Start, or try again in a moment, as long as somebody waits for the record."""
        if not self._journal.is_open(record):
            return
        try:
            self._start(record, inbox)
        except NoRoom as error:
            if self._closing is not None or time.monotonic() > until:
                inbox.fail(NoRoom(f"{lost.text}, and {error.text}", code=error.code))
            else:
                asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._start_soon, record, inbox, lost, until)

    def _start(self, record: Record, inbox: Inbox) -> None:
        """Start the record's next attempt with the best pair there is now. Raises NoRoom when there is none."""
        prompt, total = len(record.prompt) + len(record.tokens), len(record.prompt) + record.sampling.max_tokens
        pair = choose(self._ready(), prompt, total, self._journal.open_requests, record.pair)
        if pair is None:
            raise NoRoom("the workers that could hold this request have left; try again")
        self._journal.assign(record, pair)
        self._streams.open(record, inbox)
        for worker, task in _tasks(record, pair):
            if not self._send(worker, task):
                return  # it is given up, and with it this attempt

    def note(self, record: Record, tokens: Sequence[Token]) -> None:
        """These tokens of the record go to its client."""
        self._journal.write(record, tokens)

    def end(self, record: Record) -> None:
        """Nobody waits for the record any more. Workers that may still be at work are told. May be called again."""
        if self._journal.close(record):
            self._inboxes.pop(record.request_id, None)
            self._stop(record)

    def _stop(self, record: Record) -> None:
        """The latest attempt is over, whatever its workers think."""
        self._streams.close(record.attempt)
        if record.pair is None:
            return
        # What ended by itself needs no cancel, save that the first token comes from prefill: decode has not seen it.
        at_work = {None: record.pair.workers, record.begun_with: record.pair.workers[1:]}
        for worker in at_work.get(record.finished_at, ()):
            # It may have dialled again since the attempt began, and have another address now.
            self._send(self._members.find(worker.name, worker.incarnation) or worker, Cancel(record.attempt))

    def _ready(self) -> list[Pair]:
        if self._closing is not None:
            raise self._closing
        ready = pairs(self._members)
        if not ready:
            raise NoRoom(f"nobody can serve requests yet: {why_unready(self._members)}", code="not_ready")
        return ready


def _too_long(prompt: int, wanted: int | None, what: str, limit: int) -> BadRequest:
    answer = "" if wanted is None else f" and up to {wanted} for the answer (max_tokens)"
    remedy = "shorten the prompt" if prompt >= limit else "lower max_tokens or shorten the prompt"
    return BadRequest(
        f"the prompt has {prompt} tokens{answer}: more than {what}, {limit} tokens; {remedy}",
        param="max_tokens" if prompt < limit else None,
        code="context_length_exceeded",
    )


def _tasks(record: Record, pair: Pair) -> list[tuple[Member, Message]]:
    """What to send to whom for the record's latest attempt."""
    left = record.deadline - time.monotonic()
    prefill, decode = pair.prefill, pair.decode
    token_ids = (*record.prompt, *record.tokens)
    first = PrefillTask(
        attempt=record.attempt,
        token_ids=token_ids,
        generated=len(record.tokens),
        sampling=record.sampling,
        deadline_s=left,
        decode_worker=decode.name if decode else "",
        decode_incarnation=decode.incarnation if decode else Incarnation(""),
        decode_endpoint=decode.hello.peer_endpoint if decode else "",
    )
    if decode is None:
        return [(prefill, first)]
    second = DecodeTask(
        attempt=record.attempt,
        token_ids=token_ids,
        generated=len(record.tokens),
        sampling=record.sampling,
        deadline_s=left,
        prefill_worker=prefill.name,
        prefill_incarnation=prefill.incarnation,
    )
    # Decode first: it should know the attempt when prefill asks for memory.
    return [(decode, second), (prefill, first)]
