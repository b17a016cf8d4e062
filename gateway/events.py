"""Bytes to the client: JSON, server-sent events, and learning that the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError, ClientGone
from gateway.streams import Inbox

log = logging.getLogger(__name__)

dumps = json.JSONEncoder(separators=(",", ":")).encode
"""Compact JSON. Plain ASCII, so that no proxy or line splitter can misread it."""

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(body).encode() + b"\n\n"


class Chunks:
    """The events of one answer, which differ in their choices only."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = "data: " + dumps(head)[:-1] + ',"choices":['

    def event(self, choice: dict[str, Any], **more: object) -> bytes:
        """The event with this choice; `more` are further fields of the whole."""
        tail = "".join(f',"{name}":{dumps(value)}' for name, value in more.items())
        return f"{self._head}{dumps(choice)}]{tail}}}\n\n".encode()

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event after the last choice."""
        return f'{self._head}],"usage":{dumps(usage)}}}\n\n'.encode()


async def watch(receive: Receive, inbox: Inbox) -> None:
    """Until cancelled: end the request when its client hangs up. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    inbox.fail(ClientGone("the client has hung up"))


class EventStream(Response):
    """A response of server-sent events. `events` yields at least one, and is closed whatever happens.

    The status line waits for the first event, so that what fails before it is an ordinary error response. `until`
    (event loop time) bounds the whole, for a client that does not read.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], inbox: Inbox, headers: dict[str, str], until: float
    ) -> None:
        self.background = None
        self.status_code = 200
        self._events = events
        self._inbox = inbox
        self._until = until
        self.init_headers({**headers, "cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application."""
        watcher = asyncio.create_task(watch(receive, self._inbox))
        try:
            async with asyncio.timeout_at(self._until), aclosing(self._events) as events:
                await self._send_all(events, send)
        except ClientGone:
            log.info("a client hung up before its answer was complete")
        except TimeoutError:
            log.warning("a client has not read its answer in time; the connection is closed")
        finally:
            watcher.cancel()

    async def _send_all(self, events: AsyncGenerator[bytes, None], send: Send) -> None:
        body = await anext(events)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except ClientGone:
            raise
        except ApiError as error:
            await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
