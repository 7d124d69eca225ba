"""Exceptions of the router, and how those that leave it look to a client: OpenAI's shape, or Anthropic's.

Raise an ``ApiError`` anywhere below a handler: the HTTP server answers with its status, in the shape of the
API that was called. Messages tell the caller what to do; they never carry prompt text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import orjson

JSON_TYPE = (b"content-type", b"application/json")
INVALID = "invalid_request_error"


class RouterError(Exception):
    """Base of every exception of the router."""


class GatewayConfigError(RouterError, ValueError):
    """A gateway's configuration that cannot be used; the text says where and what was expected."""


class ClientLeft(RouterError, OSError):
    """The client of a request went away; nobody is left to be told. (ASGI wants an OSError.)"""


class ApiError(RouterError):
    """Base of all errors that leave the gateway; each class says its status, OpenAI's type and a code."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"
    default_retry_after_s: ClassVar[float | None] = None

    def __init_subclass__(
        cls, *, status: int | None = None, type: str | None = None, code: str | None = None
    ) -> None:
        cls.status, cls.type = status or cls.status, type or cls.type
        cls.default_code = code or cls.default_code

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.allow = allow

    def body(self) -> bytes:
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": fields})

    def event(self) -> bytes:
        """The error as a server-sent event, for a stream that has already started."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [JSON_TYPE]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        return headers


class BadRequest(ApiError, status=400, type=INVALID, code="bad_request"):
    """The request cannot be served as it is."""


class BadIdentity(BadRequest):
    """An id that cannot name a conversation, or a message too deep to be recognised."""


class ContextTooLong(BadRequest, code="context_length_exceeded"):
    """The prompt fits no engine of this fleet."""


class Unsupported(BadRequest, code="unsupported"):
    """The request is well formed, but this model or fleet cannot do it."""


class Unauthorized(ApiError, status=401, type="authentication_error", code="invalid_api_key"):
    """The key is missing or not known."""

    challenge: ClassVar[bytes] = b"Bearer"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", self.challenge)]


class PasswordWanted(Unauthorized):
    """For pages: the challenge that makes a browser ask its user."""

    challenge = b'Basic realm="ConServe: an admin key as password"'


class Forbidden(ApiError, status=403, type="permission_error", code="forbidden"):
    """The key is known and may not do this."""


class Misdirected(ApiError, status=421, type=INVALID, code="host_not_allowed"):
    """The Host header names another host: a web page may have pointed its own name to this address."""


class NotFound(ApiError, status=404, type=INVALID, code="not_found"):
    """There is no such thing here."""


class ModelNotFound(NotFound, code="model_not_found"):
    """No model answers to that name."""


class MethodNotAllowed(ApiError, status=405, type=INVALID, code="method_not_allowed"):
    """The path takes other methods: those in ``allow``."""


class RequestTimeout(ApiError, status=408, type=INVALID, code="request_timeout"):
    """A part of the request did not arrive in time."""


class Conflict(ApiError, status=409, type=INVALID, code="conflict"):
    """The object that the request names is not in a state for it."""


class PayloadTooLarge(ApiError, status=413, type=INVALID, code="request_too_large"):
    """The body is over its bound."""


class UriTooLong(ApiError, status=414, type=INVALID, code="uri_too_long"):
    """The URL is over its bound."""


class ExpectationFailed(ApiError, status=417, type=INVALID, code="expectation_failed"):
    """An ``Expect`` that is not met here."""


class TooManyRequests(ApiError, status=429, type="rate_limit_error", code="no_capacity"):
    """No capacity now; ``retry_after_s`` says when to come back."""


class RateLimited(TooManyRequests, code="rate_limit_exceeded"):
    """The caller's key has had what it may have for now."""


class HeadersTooLarge(ApiError, status=431, type=INVALID, code="headers_too_large"):
    """The head is over its bound."""


class InternalError(ApiError):
    """A fault of ours."""


class Unavailable(ApiError, status=503, code="unavailable"):
    """Not now: something of the fleet is away."""


class DirectoryUnavailable(Unavailable):
    """The directory does not answer in time, or answers that it cannot do it now, and why."""

    default_retry_after_s = 2.0


class UpstreamError(ApiError, status=502, code="engine_error"):
    """An engine did not do its part. Never raised at a client's fault."""


class EngineUnreachable(UpstreamError, code="engine_unreachable"):
    """No connection to the engine could be made: nothing of the request reached it."""


class EngineLost(UpstreamError, code="engine_lost"):
    """The connection broke while a response was due or under way."""


class SetAside(UpstreamError, code="request_set_aside"):
    """The request was running when two engines ended. Clients' libraries should not repeat it."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"x-should-retry", b"false")]


class EngineGarbled(UpstreamError, code="engine_garbled"):
    """The engine's bytes are not HTTP."""


class EngineSilent(UpstreamError, status=504, code="engine_timeout"):
    """First byte or next chunk did not come in time."""


class EngineBusy(UpstreamError, status=503, code="engine_busy"):
    """Every connection allowed to this engine stayed in use for the whole waiting time."""


class ErrorShape(NamedTuple):
    """How an error looks on the wire: OpenAI's shape everywhere, Anthropic's below `/v1/messages`."""

    body: Callable[[ApiError], bytes]
    event: Callable[[ApiError], bytes]  # inside a stream that has begun


# Anthropic's names by status; a client library decides by them whether to try again.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic_body(error: ApiError) -> bytes:
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})


def _anthropic_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + _anthropic_body(error) + b"\n\n"


OPENAI = ErrorShape(ApiError.body, ApiError.event)
ANTHROPIC = ErrorShape(_anthropic_body, _anthropic_event)
