"""What can go wrong at the gateway.

GatewayError
├── StartError            the gateway cannot start; the text says what to change
└── ApiError              ends one HTTP request; becomes an OpenAI-shaped body
    ├── BadRequest        400  the request's fault; `param` names the field
    │   ├── Unauthorised  401
    │   ├── NoSuchModel   404
    │   ├── NoSuchRoute   404
    │   ├── WrongMethod   405
    │   └── BodyTooLarge  413
    ├── NoRoom            503  nobody can serve it now; try again
    │   ├── QueueFull     429
    │   └── AttemptLost   503  this attempt is over; the next one may do better, and is begun if there is one left
    ├── DeadlinePassed    504
    ├── Broken            500  our fault
    ├── Aborted           499  somebody asked for its end
    └── ClientGone        499  nobody is left to be told
"""

from __future__ import annotations

from typing import ClassVar

from wire.messages import Fault

RETRY_AFTER_S = 1


class GatewayError(Exception):
    """Root of everything that `gateway` raises."""


class StartError(GatewayError):
    """The gateway cannot start."""


class ApiError(GatewayError):
    """Ends one HTTP request. `param`: the field at fault; `code`: a word for programs."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(self, text: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {}

    def body(self) -> dict[str, object]:
        """The error as OpenAI's clients expect it."""
        return {"error": {"message": self.text, "type": self.kind, "param": self.param, "code": self.code}}


class BadRequest(ApiError):  # noqa: N818 - named by what happened, like all below
    """The request can never be served as it is."""

    status = 400
    kind = "invalid_request_error"


class Unauthorised(BadRequest):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"


class NoSuchModel(BadRequest):
    """Another model than the one served here was asked for."""

    status = 404

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"model {asked!r} is not served here; use {served!r}", param="model", code="model_not_found")


class NoSuchRoute(BadRequest):
    """No such path."""

    status = 404


class WrongMethod(BadRequest):
    """The path exists, but not with this method."""

    status = 405


class BodyTooLarge(BadRequest):
    """The body is over the limit."""

    status = 413


class NoRoom(ApiError):  # noqa: N818
    """Nobody can serve the request now; the same request may succeed later."""

    status = 503
    kind = "service_unavailable"

    @property
    def headers(self) -> dict[str, str]:
        """When to try again."""
        return {"retry-after": str(RETRY_AFTER_S)}


class QueueFull(NoRoom):
    """Too many requests are open."""

    status = 429
    kind = "rate_limit_error"


class AttemptLost(NoRoom):
    """An attempt was lost with its worker, or by a fault of ours. `counts`: against the limit on attempts."""

    def __init__(self, text: str, *, counts: bool = True) -> None:
        super().__init__(text, code="attempt_lost")
        self.counts = counts


class Aborted(ApiError):  # noqa: N818
    """`POST /v1/abort` named this request."""

    status = 499
    kind = "aborted"


class DeadlinePassed(ApiError):  # noqa: N818
    """The answer did not come in time."""

    status = 504
    kind = "timeout_error"


class Broken(ApiError):  # noqa: N818
    """Something of ours failed."""


class ClientGone(ApiError):  # noqa: N818
    """The client has hung up."""

    status = 499


def from_fault(fault: Fault, text: str) -> ApiError:
    """What a worker's `Failed` means."""
    match fault:
        case Fault.REQUEST:
            return BadRequest(text)
        case Fault.NO_ROOM:
            return NoRoom(text)
        case Fault.OURS | Fault.LEAVING:
            return AttemptLost(text, counts=fault is Fault.OURS)
