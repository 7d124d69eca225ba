"""Checks the parameters of the Files and Batch APIs; a refusal names the parameter and its valid values."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import orjson

from router.batch.config import HOUR_S, MAX_WINDOW_S, MIN_WINDOW_S
from router.batch.store.records import ENDPOINTS, NewBatch
from router.errors import BadRequest, excerpt

_WINDOW = re.compile(r"([1-9][0-9]{0,4})(h|d)")
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MIN_TTL_S, _MAX_TTL_S = HOUR_S, 30 * 24 * HOUR_S
_WHOLE = re.compile("[0-9]{1,8}")


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
        window_s=window_seconds(window),
        output_ttl_s=_output_ttl_s(given.get("output_expires_after")),
        metadata=_metadata(given.get("metadata")),
    )


def window_seconds(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * (HOUR_S if match[2] == "h" else 24 * HOUR_S) if match else 0
    if not MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
        raise invalid(
            "completion_window",
            f"Invalid value: '{excerpt(window)}'. The completion window is from 1h to 7d, such as '24h' or "
            "'3d'.",
        )
    return seconds


def missing(param: str) -> BadRequest:
    return BadRequest(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def invalid(param: str, message: str, code: str = "invalid_value") -> BadRequest:
    return BadRequest(message, param=param, code=code)


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name)
    if value is None:
        raise missing(name)
    if not isinstance(value, str):
        raise invalid(name, f"'{name}' must be a string.", "invalid_type")
    return value


def one_of(value: object, param: str, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        names = ", ".join(f"'{name}'" for name in allowed)
        given = f": '{excerpt(value)}'" if isinstance(value, str) else ""
        raise invalid(param, f"Invalid value{given}. Supported values are: {names}.")
    return value


def page_limit(query: Mapping[str, str], most: int, default: int) -> int:
    text = query.get("limit")
    if text is None:
        return default
    if not (_WHOLE.fullmatch(text) and 1 <= int(text) <= most):
        raise invalid("limit", f"'limit' must be from 1 to {most}.")
    return int(text)


def clean_id_text(text: str) -> str:
    """Return an id without U+0000, which PostgreSQL does not accept."""
    return text.replace("\0", "")


def time_to_live_s(anchor: object, seconds: object, param: str) -> int:
    one_of(anchor, f"{param}.anchor", ("created_at",))
    if isinstance(seconds, str) and _WHOLE.fullmatch(seconds):
        seconds = int(seconds)
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not _MIN_TTL_S <= seconds <= _MAX_TTL_S:
        allowed = f"a whole number from {_MIN_TTL_S} to {_MAX_TTL_S}"
        raise invalid(f"{param}.seconds", f"'{param}.seconds' must be {allowed}.")
    return seconds


def _output_ttl_s(given: object) -> int | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise invalid("output_expires_after", "'output_expires_after' must be an object.", "invalid_type")
    return time_to_live_s(given.get("anchor"), given.get("seconds"), "output_expires_after")


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
        raise invalid(
            "metadata",
            f"'metadata' holds up to {_MAX_PAIRS} pairs of strings: keys up to {_MAX_KEY} characters, "
            f"values up to {_MAX_VALUE}.",
        )
    return given
