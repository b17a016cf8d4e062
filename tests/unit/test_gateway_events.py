from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from gateway.errors import ApiError, NoRoom
from gateway.events import EventStream, event
from gateway.streams import Inbox


class Client:
    """The server's side of one connection, as an ASGI application sees it."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


class Source:
    """Events that end as told, and whether they were closed."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self._end = end
        self.closed = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            await self._end()
            yield b"two"
        finally:
            self.closed = True


async def nothing() -> None:
    pass


async def no_room() -> None:
    raise NoRoom("lost")


async def answer(client: Client, source: Source, inbox: Inbox, within_s: float = 60.0) -> None:
    until = asyncio.get_running_loop().time() + within_s
    await EventStream(source.events(), inbox, {"x-request-id": "r"}, until)({}, client.receive, client.send)


def test_headers_events_and_end() -> None:
    async def scenario() -> None:
        client, source = Client(), Source(nothing)
        await answer(client, source, Inbox())
        start, *bodies = client.got
        assert (b"x-request-id", b"r") in start["headers"]
        assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
        assert client.body == b"onetwo"
        assert [body["more_body"] for body in bodies] == [True, True, False]
        assert source.closed

    asyncio.run(scenario())


def test_error_in_mid_stream_is_an_event() -> None:
    async def scenario() -> None:
        client, source = Client(), Source(no_room)
        await answer(client, source, Inbox())
        assert client.body == b"one" + event(NoRoom("lost").body())
        assert client.got[-1]["more_body"] is False
        assert source.closed

    asyncio.run(scenario())


def test_error_before_the_first_event_is_not_swallowed() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        raise NoRoom("nobody")
        yield b""

    async def scenario() -> None:
        client = Client()
        with pytest.raises(ApiError, match="nobody"):
            await EventStream(failing(), Inbox(), {}, 1e12)({}, client.receive, client.send)
        assert client.got == []

    asyncio.run(scenario())


def test_client_that_hangs_up_ends_the_wait() -> None:
    async def scenario() -> None:
        client, inbox = Client(), Inbox()
        source = Source(inbox.take)
        client.gone.set()
        await asyncio.wait_for(answer(client, source, inbox), 20)
        assert client.body == b"one"
        assert source.closed

    asyncio.run(scenario())


def test_client_that_never_reads_is_let_go() -> None:
    class Stuck(Client):
        async def send(self, message: Any) -> None:
            await super().send(message)
            await asyncio.Event().wait()

    async def scenario() -> None:
        client, source = Stuck(), Source(nothing)
        await asyncio.wait_for(answer(client, source, Inbox(), within_s=0.01), 20)
        assert len(client.got) == 1
        assert source.closed

    asyncio.run(scenario())
