"""How an error looks on the wire: OpenAI's shape everywhere, Anthropic's below `/v1/messages`."""

from collections.abc import Callable
from typing import NamedTuple

import orjson

from router.errors import ApiError

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


class ErrorShape(NamedTuple):
    body: Callable[[ApiError], bytes]
    event: Callable[[ApiError], bytes]  # inside a stream that has begun


def _anthropic_body(error: ApiError) -> bytes:
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})


def _anthropic_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + _anthropic_body(error) + b"\n\n"


OPENAI = ErrorShape(ApiError.body, ApiError.event)
ANTHROPIC = ErrorShape(_anthropic_body, _anthropic_event)
