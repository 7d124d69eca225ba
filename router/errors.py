"""Every error a client can see, as a typed exception in the OpenAI shape.

Raise one anywhere below a handler: the HTTP server turns it into
``{"error": {"message", "type", "param", "code"}}`` with the class's status. Messages tell the caller what to
do; they never carry prompt text.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import orjson

JSON_TYPE = (b"content-type", b"application/json")


class ApiError(Exception):
    """Base of all errors that leave the gateway."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = "internal_error"

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
        self.retry_after_s = retry_after_s
        self.allow = allow

    def payload(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return orjson.dumps(self.payload())

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


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"
    default_code = "bad_request"


class ContextTooLong(BadRequest):
    default_code = "context_length_exceeded"


class Unsupported(BadRequest):
    """The request is well formed, but this model or fleet cannot do it."""

    default_code = "unsupported"


class Unauthorized(ApiError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"

    challenge: ClassVar[bytes] = b"Bearer"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", self.challenge)]


class PasswordWanted(Unauthorized):
    """For pages: the challenge that makes a browser ask its user."""

    challenge = b'Basic realm="ConServe: an admin key as password"'


class Forbidden(ApiError):
    status = 403
    type = "permission_error"
    default_code = "forbidden"


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class ModelNotFound(NotFound):
    default_code = "model_not_found"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class RequestTimeout(ApiError):
    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class Conflict(ApiError):
    status = 409
    type = "invalid_request_error"
    default_code = "conflict"


class PayloadTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class UriTooLong(ApiError):
    status = 414
    type = "invalid_request_error"
    default_code = "uri_too_long"


class ExpectationFailed(ApiError):
    status = 417
    type = "invalid_request_error"
    default_code = "expectation_failed"


class TooManyRequests(ApiError):
    """No room now; ``retry_after_s`` says when to come back."""

    status = 429
    type = "rate_limit_error"
    default_code = "no_room"


class HeadersTooLarge(ApiError):
    status = 431
    type = "invalid_request_error"
    default_code = "headers_too_large"


class InternalError(ApiError):
    pass


class Unavailable(ApiError):
    status = 503
    default_code = "unavailable"


class UpstreamError(ApiError):
    """An engine did not do its part. Never raised at a client's fault."""

    status = 502
    default_code = "engine_error"


class EngineUnreachable(UpstreamError):
    """No connection to the engine could be made: nothing of the request reached it."""

    default_code = "engine_unreachable"


class EngineLost(UpstreamError):
    """The connection broke while a response was due or under way."""

    default_code = "engine_lost"


class EngineGarbled(UpstreamError):
    """The engine's bytes are not HTTP."""

    default_code = "engine_garbled"


class EngineSilent(UpstreamError):
    """First byte or next chunk did not come in time."""

    status = 504
    default_code = "engine_timeout"


class EngineBusy(UpstreamError):
    """Every connection allowed to this engine stayed in use for the whole waiting time."""

    status = 503
    default_code = "engine_busy"
