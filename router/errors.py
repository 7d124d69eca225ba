"""Defines the router's exceptions, and their form on the wire: OpenAI's or Anthropic's.

A handler and everything that it calls may raise ``ApiError``: the HTTP server answers with its status, in the
form of the API that was called. Messages tell the caller what to do and contain no prompt text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import orjson

JSON_TYPE = (b"content-type", b"application/json")
INVALID = "invalid_request_error"
_EXCERPT_CHARS = 100


def excerpt(value: str) -> str:
    """Return `value`, which a client sent, cut to a length that fits into an error message."""
    return value if len(value) <= _EXCERPT_CHARS else f"{value[:_EXCERPT_CHARS]}…"


class RouterError(Exception):
    """Base of every exception of the router."""


class GatewayConfigError(RouterError, ValueError):
    """A gateway's configuration is invalid. The message says where, and what was expected."""


class ClientLeft(RouterError):
    """The client disconnected before its answer was complete."""


class ApiError(RouterError):
    """Base of all errors that clients receive. Each class has an HTTP status, an OpenAI type and a code."""

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
        """Return the error as a server-sent event, for a stream that has already started."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = [JSON_TYPE]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        return headers


class BadRequest(ApiError, status=400, type=INVALID, code="bad_request"):
    """The request is invalid; the message says what the caller has to change."""


class BadIdentity(BadRequest):
    """The request's id cannot name a conversation, or a message is nested too deeply to be hashed."""


class ContextTooLong(BadRequest, code="context_length_exceeded"):
    """The prompt is too long for every engine of this fleet."""


class Unsupported(BadRequest, code="unsupported"):
    """The request is well formed, but this model or fleet does not support it."""


class Unauthorized(ApiError, status=401, type="authentication_error", code="invalid_api_key"):
    """The request has no API key, or one that is unknown or expired."""

    challenge: ClassVar[bytes] = b"Bearer"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", self.challenge)]


class PasswordWanted(Unauthorized):
    """The page needs a password. The `challenge` makes the browser ask its user for one."""

    challenge = b'Basic realm="ConServe: an admin key as password"'


class Forbidden(ApiError, status=403, type="permission_error", code="forbidden"):
    """The API key is valid but does not permit this request."""


class Misdirected(ApiError, status=421, type=INVALID, code="host_not_allowed"):
    """The `Host` header names another host: a web page may have pointed its host name to this address."""


class NotFound(ApiError, status=404, type=INVALID, code="not_found"):
    """The object or path does not exist."""


class ModelNotFound(NotFound, code="model_not_found"):
    """No model of this fleet has the requested name."""


class MethodNotAllowed(ApiError, status=405, type=INVALID, code="method_not_allowed"):
    """The path does not allow this method; ``allow`` lists the methods that it allows."""


class RequestTimeout(ApiError, status=408, type=INVALID, code="request_timeout"):
    """A part of the request did not arrive in time."""


class Conflict(ApiError, status=409, type=INVALID, code="conflict"):
    """The state of the named object does not allow the request."""


class PayloadTooLarge(ApiError, status=413, type=INVALID, code="request_too_large"):
    """The body exceeds its limit."""


class UriTooLong(ApiError, status=414, type=INVALID, code="uri_too_long"):
    """The URL exceeds its limit."""


class ExpectationFailed(ApiError, status=417, type=INVALID, code="expectation_failed"):
    """The ``Expect`` header asks for something that this server does not support."""


class TooManyRequests(ApiError, status=429, type="rate_limit_error", code="no_capacity"):
    """No capacity is free; ``retry_after_s`` says when to try again."""


class RateLimited(TooManyRequests, code="rate_limit_exceeded"):
    """The caller's API key has reached one of its limits, such as tokens per minute."""


class HeadersTooLarge(ApiError, status=431, type=INVALID, code="headers_too_large"):
    """The request's head exceeds its limit."""


class InternalError(ApiError):
    """The gateway itself failed."""


class Unavailable(ApiError, status=503, code="unavailable"):
    """A part of the fleet is unavailable at the moment."""


class DirectoryUnavailable(Unavailable):
    """The directory did not answer in time, or it answered that it cannot place turns."""

    default_retry_after_s = 2.0


class UpstreamError(ApiError, status=502, code="engine_error"):
    """An engine failed. A client's mistake never raises this error."""


class EngineUnreachable(UpstreamError, code="engine_unreachable"):
    """The engine could not be connected to, so no part of the request reached it."""


class EngineLost(UpstreamError, code="engine_lost"):
    """The connection to the engine broke before its response was complete."""


class SetAside(UpstreamError, code="request_set_aside"):
    """The request is in quarantine: two engines ended while running it. Clients are told not to retry."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"x-should-retry", b"false")]


class EngineGarbled(UpstreamError, code="engine_garbled"):
    """The engine's response is not valid HTTP."""


class EngineSilent(UpstreamError, status=504, code="engine_timeout"):
    """The engine's first byte or next chunk did not arrive in time."""


class EngineBusy(UpstreamError, status=503, code="engine_busy"):
    """No connection to the engine became free in the time that a request may wait for one."""


class ErrorShape(NamedTuple):
    """Form of an error on the wire: Anthropic's below `/v1/messages`, OpenAI's everywhere else."""

    body: Callable[[ApiError], bytes]
    event: Callable[[ApiError], bytes]  # inside a stream that has begun


# Anthropic's error types by status, by which client libraries decide whether to retry.
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
