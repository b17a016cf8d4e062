from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Broken, NoRoom
from gateway.journal import Record
from gateway.streams import Inbox, Streams
from wire.messages import AttemptId, Finish, Sampling, Token


def record(max_tokens: int = 8, index: int = 0) -> Record:
    return Record("r", index, (1, 2), Sampling(0.0, 1.0, 0, 0, max_tokens, (), None), 1e9, attempts=1)


def token(index: int, attempt: str = "r-0/1", *, token_id: int | None = None, finish: Finish | None = None) -> Token:
    return Token(AttemptId(attempt), index, 100 + index if token_id is None else token_id, None, (), finish)


def opened(max_tokens: int = 8) -> tuple[Streams, Inbox]:
    streams, inbox = Streams(), Inbox()
    streams.open(record(max_tokens), inbox)
    return streams, inbox


def take(inbox: Inbox) -> list[int]:
    """The indexes of the tokens that are ready; the inbox must not be empty."""

    async def taken() -> list[int]:
        streams = await asyncio.wait_for(inbox.take(), 5)
        return [token.index for stream in streams for token in stream.take()]

    return asyncio.run(taken())


def nothing_ready(inbox: Inbox) -> bool:
    async def empty() -> bool:
        task = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        done = task.done()
        task.cancel()
        return not done

    return asyncio.run(empty())


def test_decode_may_overtake_prefill() -> None:
    streams, inbox = opened()
    streams.on_tokens([token(1), token(2)])
    assert nothing_ready(inbox)
    streams.on_tokens([token(0)])
    assert take(inbox) == [0, 1, 2]


def test_duplicates_are_dropped_and_the_first_one_counts() -> None:
    streams, inbox = opened()
    streams.on_tokens([token(0), token(0, token_id=7), token(1)])
    assert take(inbox) == [0, 1]
    streams.on_tokens([token(1), token(0)])
    assert nothing_ready(inbox)


def test_other_attempts_are_dropped() -> None:
    streams, inbox = opened()
    streams.on_tokens([token(0, "r-0/0"), token(0, "r-0/2"), token(0, "q-0/1")])
    assert nothing_ready(inbox)
    streams.close(AttemptId("r-0/1"))
    streams.on_tokens([token(0)])
    assert nothing_ready(inbox)


def test_nothing_follows_the_token_that_finishes() -> None:
    streams, inbox = opened()
    streams.on_tokens([token(1), token(0, finish=Finish.STOP), token(2)])
    assert take(inbox) == [0]
    streams.fail(AttemptId("r-0/1"), Broken("too late to matter"))
    assert nothing_ready(inbox)


def test_tokens_past_the_limit_are_not_kept() -> None:
    streams, inbox = opened(max_tokens=2)
    streams.on_tokens([token(index) for index in (10**9, 2, 1, 0)])
    assert take(inbox) == [0, 1]


def test_tokens_go_out_before_the_error() -> None:
    async def scenario() -> None:
        streams, inbox = opened()
        streams.on_tokens([token(0), token(2)])
        streams.fail(AttemptId("r-0/1"), NoRoom("lost"))
        streams.on_tokens([token(1)])
        (stream,) = await inbox.take()
        assert [token.index for token in stream.take()] == [0]
        (stream,) = await inbox.take()
        with pytest.raises(NoRoom, match="lost"):
            stream.take()

    asyncio.run(scenario())


def test_waiting_ends_when_something_comes() -> None:
    async def scenario() -> None:
        streams, inbox = opened()
        waiting = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        assert not waiting.done()
        streams.on_tokens([token(0)])
        (stream,) = await asyncio.wait_for(waiting, 5)
        assert [token.index for token in stream.take()] == [0]
        waiting = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        inbox.fail(Broken("first"))
        inbox.fail(Broken("second"))
        with pytest.raises(Broken, match="first"):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=8))
def test_any_order_with_any_repeats_comes_out_in_order(order: list[int], repeats: list[int]) -> None:
    async def scenario() -> list[int]:
        streams, inbox = opened()
        got: list[int] = []
        for index in [*repeats, *order]:
            streams.on_tokens([token(index, finish=Finish.LENGTH if index == 7 else None)])
            if streams and not nothing_pending(inbox):
                got += [token.index for stream in await inbox.take() for token in stream.take()]
        return got

    def nothing_pending(inbox: Inbox) -> bool:
        return not inbox._ready

    assert asyncio.run(scenario()) == list(range(8))
