"""What callers may ask for, checked. Refusals name the parameter and say what would be accepted."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from router.batch.config import HOUR_S, MAX_WINDOW_S, MIN_WINDOW_S
from router.batch.records import ENDPOINTS
from router.errors import BadRequest

_WINDOW = re.compile(r"([1-9][0-9]{0,4})(h|d)")
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MIN_TTL_S, _MAX_TTL_S = HOUR_S, 30 * 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class NewBatch:
    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    output_ttl_s: int | None
    metadata: dict[str, str] | None


def new_batch(body: bytes) -> NewBatch:
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise BadRequest("The request body is not valid JSON.", code="invalid_json") from None
    if not isinstance(given, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    window = _text(given, "completion_window")
    return NewBatch(
        input_file_id=_text(given, "input_file_id"),
        endpoint=one_of(_text(given, "endpoint"), "endpoint", ENDPOINTS),
        completion_window=window,
        window_s=_window_s(window),
        output_ttl_s=_output_ttl_s(given.get("output_expires_after")),
        metadata=_metadata(given.get("metadata")),
    )


def ttl_s(anchor: object, seconds: object, param: str) -> int:
    one_of(anchor, f"{param}.anchor", ("created_at",))
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit():
        seconds = int(seconds)
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not _MIN_TTL_S <= seconds <= _MAX_TTL_S:
        raise BadRequest(
            f"'{param}.seconds' must be a whole number from {_MIN_TTL_S} to {_MAX_TTL_S}.",
            param=f"{param}.seconds",
            code="invalid_value",
        )
    return seconds


def limit(query: Mapping[str, str], most: int, default: int) -> int:
    text = query.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise BadRequest(f"'limit' must be from 1 to {most}.", param="limit", code="invalid_value")
    return int(text)


def id_of(text: str | None) -> str | None:
    """As it may be asked of any store: PostgreSQL knows no U+0000."""
    return text.replace("\0", "") if text is not None else None


def one_of(value: object, param: str, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        names = ", ".join(f"'{name}'" for name in allowed)
        raise BadRequest(
            f"Invalid value: '{value}'. Supported values are: {names}.", param=param, code="invalid_value"
        )
    return value


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name)
    if value is None:
        raise BadRequest(
            f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
        )
    if not isinstance(value, str):
        raise BadRequest(f"'{name}' must be a string.", param=name, code="invalid_type")
    return value


def _window_s(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * (HOUR_S if match[2] == "h" else 24 * HOUR_S) if match else 0
    if not MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
        raise BadRequest(
            f"Invalid value: '{window}'. The completion window is from 1h to 7d, such as '24h' or '3d'.",
            param="completion_window",
            code="invalid_value",
        )
    return seconds


def _output_ttl_s(given: object) -> int | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise BadRequest(
            "'output_expires_after' must be an object.", param="output_expires_after", code="invalid_type"
        )
    return ttl_s(given.get("anchor"), given.get("seconds"), "output_expires_after")


def _metadata(given: object) -> dict[str, str] | None:
    if given is None:
        return None
    good = (
        isinstance(given, dict)
        and len(given) <= _MAX_PAIRS
        and all(len(key) <= _MAX_KEY for key in given)
        and all(isinstance(value, str) and len(value) <= _MAX_VALUE for value in given.values())
    )
    if not good or not isinstance(given, dict):
        raise BadRequest(
            f"'metadata' holds up to {_MAX_PAIRS} pairs of strings: keys up to {_MAX_KEY} characters, "
            f"values up to {_MAX_VALUE}.",
            param="metadata",
            code="invalid_value",
        )
    return given
