"""The gateway process: HTTP in front, workers behind.

run ─▶ listen (HTTP port) ─▶ Control (workers' port) ─▶ uvicorn ─▶ Serving.completions / Serving.chat
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from hmac import compare_digest
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.attempts import Attempts
from gateway.config import GatewayConfig
from gateway.control import Control
from gateway.errors import ApiError, Broken, NoSuchRoute, StartError, Unauthorised, WrongMethod
from gateway.events import dumps
from gateway.journal import Journal, Record
from gateway.members import Member, Members
from gateway.router import why_unready
from gateway.serving import Serving
from gateway.streams import Streams
from gateway.tokenizer import Tokenizer

_OPEN_TO_ALL = ("/health", "/ready")

log = logging.getLogger(__name__)


def run(config: GatewayConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; call in the main thread. `on_ready` gets the URL once clients may connect.

    Raises StartError when the model's folder, the HTTP port or the control endpoint cannot be used.
    """
    tokenizer = Tokenizer(config.model_path)
    with listen(config.host, config.port) as listener:
        asyncio.run(_serve(config, tokenizer, listener, on_ready))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at host:port. Raises StartError when it cannot."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error}; give another host") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it: a token's event must not wait for the one before to be acknowledged.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop what uses it or give another port (0: any)"
        ) from error
    return listener


async def _serve(
    config: GatewayConfig, tokenizer: Tokenizer, listener: socket.socket, on_ready: Callable[[str], None]
) -> None:
    members, journal, streams = Members(config.silence_s), Journal(config.max_queue), Streams()
    control = Control(config.control_endpoint, config.heartbeat_s, members, journal, streams)
    attempts = Attempts(members, journal, streams, control.send, config.retry_limits)
    app = make_app(Serving(config, tokenizer, attempts), members, journal)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None, None]:
        controlling = asyncio.create_task(control.run())
        controlling.add_done_callback(lambda _: server.stop())  # without workers there is nothing to serve
        yield
        controlling.cancel()
        with suppress(asyncio.CancelledError):
            await controlling

    app.router.lifespan_context = lifespan
    server = _Server(app, config, attempts, lambda: on_ready(url))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    await server.serve([listener])


class _Server(uvicorn.Server):
    """Uvicorn, which ends open streams first when told to stop, and leaves signals to the event loop."""

    def __init__(self, app: FastAPI, config: GatewayConfig, attempts: Attempts, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=config.stop_within_s,
            )
        )
        self._attempts = attempts
        self._on_ready = on_ready

    def stop(self) -> None:
        """Begin to shut down."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._attempts.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_app(serving: Serving, members: Members, journal: Journal) -> FastAPI:
    """The routes. Errors of every kind have OpenAI's shape."""
    key = serving.config.api_key

    async def authorise(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if (
            key is None
            or request.url.path in _OPEN_TO_ALL
            or compare_digest(given.encode(), f"Bearer {key}".encode())
        ):
            return
        raise Unauthorised("a valid API key is needed: send the header Authorization: Bearer KEY")

    app = FastAPI(openapi_url=None, dependencies=[Depends(authorise)])
    model = {
        "id": serving.config.served_model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "tandem",
        "max_model_len": serving.tokenizer.max_context,
    }
    app.add_api_route("/v1/completions", serving.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", serving.chat, methods=["POST"])

    app.add_api_route("/v1/abort", serving.abort, methods=["POST"])

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model]})

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        reason = why_unready(members)
        body = {"ready": reason is None, "reason": reason, "workers": [_described(member) for member in members]}
        return _json(body, 200 if reason is None else 503)

    @app.get("/debug/requests")
    async def requests() -> Response:
        return _json({"recent": [_retold(record) for record in journal.recent]})

    @app.get("/debug/state")
    async def state() -> Response:
        now = time.monotonic()
        workers = [{**_described(member), "silent_s": now - member.heard_at} for member in members]
        opened = [{**_retold(record), "seconds_left": record.deadline - now} for record in journal]
        return _json({"workers": workers, "open": opened, "open_by_worker": dict(journal.open_requests)})

    @app.exception_handler(ApiError)
    async def api_error(_request: Request, error: ApiError) -> Response:
        return _json(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        kind = NoSuchRoute if error.status_code == 404 else WrongMethod
        body = kind(f"{request.method} {request.url.path}: {error.detail}").body()
        return _json(body, error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def broken(request: Request, _error: Exception) -> Response:
        # The server logs the traceback; the client has no use for it.
        return await api_error(request, Broken("the gateway failed; its log says why"))

    return app


def _described(member: Member) -> dict[str, Any]:
    load = member.load
    return {
        "name": member.name,
        "role": member.hello.role.value,
        "model": member.hello.model,
        "fingerprint": member.hello.fingerprint,
        "spec_digest": member.hello.spec_digest,
        "max_request_tokens": member.hello.capacity.max_request_tokens,
        "incarnation": member.incarnation,
        "load": asdict(load) if load else None,
    }


def _retold(record: Record) -> dict[str, Any]:
    """What became of a request, and what its hand-offs cost."""
    return {
        "id": record.request_id,
        "prompt_tokens": len(record.prompt),
        "completion_tokens": len(record.tokens),
        "cached_tokens": record.cached_tokens,
        "attempts": record.attempts,
        "finished": record.finished_at is not None,
        "handoffs": [
            {
                "decode": report.worker,
                "bytes": report.nbytes,
                "cached_tokens": report.cached_tokens,
                "wire_seconds": report.wire_s,
                "unhidden_seconds": report.unhidden_s,
            }
            for report in record.handoffs
        ],
    }


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(body), status, headers, media_type="application/json")
