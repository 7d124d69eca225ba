"""From an engine's answer to a result: usage read, body kept as one line of JSON."""

import secrets
from collections.abc import Mapping
from typing import Any

import orjson

from router.batch.records import ClaimedRequest, Result, Usage
from router.errors import EngineGarbled


def engine_body(line: bytes, priority: int) -> bytes:
    """The body of an input line as it goes to an engine: marked as offline, never streamed."""
    body: dict[str, Any] = orjson.loads(line)["body"]
    return offline_body(body, priority)


def offline_body(body: Mapping[str, Any], priority: int) -> bytes:
    """`priority` above 0 is what the engines' scheduler takes for offline work."""
    marked = {name: value for name, value in body.items() if name != "service_tier"}
    return orjson.dumps({**marked, "priority": priority})


def answered(request: ClaimedRequest, status: int, body: bytes) -> Result:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        if status == 200:
            raise EngineGarbled("The engine's answer is not JSON.") from None
        parsed = {"error": {"message": body[:500].decode(errors="replace"), "code": None}}
    usage = _usage(parsed.get("usage")) if isinstance(parsed, dict) else Usage()
    return Result(request.batch, request.line, status, orjson.dumps(parsed), secrets.token_hex(16), usage)


def failed(request: ClaimedRequest, code: str, message: str) -> Result:
    body = orjson.dumps({"code": code, "message": message})
    return Result(request.batch, request.line, 0, body, secrets.token_hex(16))


def _usage(usage: Any) -> Usage:
    """Both spellings: of chat completions and of responses."""
    if not isinstance(usage, dict):
        return Usage()

    def count(source: Any, *names: str) -> int:
        values = (source.get(name) for name in names) if isinstance(source, dict) else ()
        return next((value for value in values if isinstance(value, int)), 0)

    inputs = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    outputs = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    return Usage(
        input_tokens=count(usage, "prompt_tokens", "input_tokens"),
        cached_tokens=count(inputs, "cached_tokens"),
        output_tokens=count(usage, "completion_tokens", "output_tokens"),
        reasoning_tokens=count(outputs, "reasoning_tokens"),
    )
