"""Tokens to text: one `Answer` for each prompt, and the loop that carries a request's answers to their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from gateway.attempts import Attempts
from gateway.detokenise import Vocabulary
from gateway.errors import AttemptLost, DeadlinePassed
from gateway.journal import Record
from gateway.stops import Stops
from gateway.streams import Inbox
from wire.messages import Finish, Token


@dataclass(frozen=True, slots=True)
class Delta:
    """What some tokens add to answer number `index`.

    `tokens` are all that were sampled and count as usage; `spoken` leaves out the end-of-sequence token, which is
    part neither of the text nor of its log-probabilities. With a stop string, `tokens` goes up to the token that
    completes it. `text` may lag behind its tokens and may be empty.
    """

    index: int
    first: bool
    text: str
    tokens: tuple[Token, ...]
    spoken: tuple[Token, ...]
    finish: Finish | None


class Answer:
    """The answer to one prompt."""

    def __init__(self, record: Record, vocabulary: Vocabulary, stops: Sequence[str]) -> None:
        self.record = record
        self._text = vocabulary.detokeniser()
        self._stops = Stops(stops)
        self._begun = False

    def feed(self, tokens: Sequence[Token]) -> Delta:
        """What these tokens, the next ones, add. After a stop string the rest is dropped."""
        text, finish, used = "", None, 0
        spoken: list[Token] = []
        for token in tokens:
            used += 1
            ends = token.finish is Finish.STOP and token.token_id in self.record.sampling.stop_token_ids
            piece = "" if ends else self._text.step(token.token_id)
            if not ends:
                spoken.append(token)
            if token.finish is not None:
                piece += self._text.finish()
            text += self._stops.feed(piece)
            finish = Finish.STOP if self._stops.hit else token.finish
            if finish is not None:
                text += self._stops.flush()
                break
        first, self._begun = not self._begun, True
        return Delta(self.record.index, first, text, tuple(tokens[:used]), tuple(spoken), finish)


def join(parts: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one answer as one."""
    return Delta(
        parts[0].index,
        parts[0].first,
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.tokens),
        tuple(token for part in parts for token in part.spoken),
        parts[-1].finish,
    )


async def deltas(attempts: Attempts, inbox: Inbox, answers: Sequence[Answer]) -> AsyncGenerator[Delta, None]:
    """All answers, piece by piece as they come; those of one request may interleave.

    Whatever ends the iteration (all finished, an error, the caller), nothing is left open. Raises ApiError.
    """
    late = DeadlinePassed("the answer was not complete in time; ask for fewer tokens or try again later")
    timer = asyncio.get_running_loop().call_at(answers[0].record.deadline, inbox.fail, late)
    waiting = {answer.record.index: answer for answer in answers}
    try:
        for answer in answers:
            attempts.open(answer.record, inbox)
        while waiting:
            for stream in await inbox.take():
                answer = waiting[stream.record.index]
                try:
                    tokens = stream.take()
                except AttemptLost as lost:
                    attempts.replay(answer.record, inbox, lost)
                    continue
                delta = answer.feed(tokens)
                attempts.note(answer.record, delta.tokens)
                if delta.finish is not None:
                    attempts.end(answer.record)
                    del waiting[answer.record.index]
                yield delta
    finally:
        timer.cancel()
        for answer in waiting.values():
            attempts.end(answer.record)
