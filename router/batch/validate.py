"""Is one line a request we can run? Pure: bytes in, what the dispatcher must know out, or a `BadLine`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from router.batch.lineerrors import BadLine, missing, wrong_type

BYTES_PER_TOKEN = 4  # a guess good enough to share decoders by; corrected by each answer's usage
DEFAULT_OUTPUT_TOKENS = 256
_TEXT_OR_PARTS = (str, list)


@dataclass(frozen=True, slots=True)
class LineRules:
    endpoint: str
    longest: int
    custom_id_chars: int
    models: Collection[str] | None  # served by the fleet; None: not known, engines will say


@dataclass(frozen=True, slots=True)
class CheckedLine:
    custom_id: str
    model: str
    body: dict[str, Any]
    est_tokens: int


def check_line(data: bytes | None, rules: LineRules) -> CheckedLine:
    if data is None:
        raise BadLine("line_too_large", f"This line is longer than the {rules.longest} bytes allowed.")
    entry = _parse(data)
    custom_id = _text(entry, "custom_id", "custom_id")
    if not custom_id:
        raise BadLine("invalid_value", "Invalid 'custom_id': it must not be empty.", "custom_id")
    if "\0" in custom_id:
        raise BadLine("invalid_value", "Invalid 'custom_id': it must not contain U+0000.", "custom_id")
    if len(custom_id) > rules.custom_id_chars:
        limit = rules.custom_id_chars
        raise BadLine(
            "string_above_max_length", f"'custom_id' is longer than {limit} characters.", "custom_id"
        )
    method = _text(entry, "method", "method")
    if method != "POST":
        raise BadLine(
            "invalid_method", f"Invalid value: '{method}'. The only supported value is 'POST'.", "method"
        )
    url = _text(entry, "url", "url")
    if url != rules.endpoint:
        raise BadLine(
            "url_mismatch",
            f"The URL '{url}' of this request is not the batch's endpoint '{rules.endpoint}'.",
            "url",
        )
    if "body" not in entry:
        raise missing("body")
    body = entry["body"]
    if not isinstance(body, dict):
        raise wrong_type("body", "an object", body)
    model = _text(body, "model", "body.model")
    if rules.models is not None and model not in rules.models:
        raise BadLine("model_not_found", f"The model '{model}' is not served by this fleet.", "body.model")
    _check_common(body)
    _CHECKS[rules.endpoint](body)
    return CheckedLine(custom_id, model, body, estimated_tokens(len(data), body))


def _parse(data: bytes) -> dict[str, Any]:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise BadLine(
            "invalid_encoding", f"This line is not valid UTF-8 (byte {error.start} of the line)."
        ) from None
    if not data.strip():
        raise BadLine("invalid_json_line", "This line is empty.")
    try:
        entry = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadLine(
            "invalid_json_line", f"This line is not parseable as valid JSON: {error.msg}."
        ) from None
    if not isinstance(entry, dict):
        raise BadLine("invalid_json_line", "This line is not a JSON object.")
    return entry


def _text(entry: dict[str, Any], name: str, param: str) -> str:
    if name not in entry:
        raise missing(param)
    value = entry[name]
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    return value


def _check_common(body: dict[str, Any]) -> None:
    try:
        orjson.dumps(body)  # it is written anew for the engine
    except orjson.JSONEncodeError:
        raise BadLine("invalid_request", "'body' is nested too deeply.", "body") from None
    if body.get("stream"):
        raise BadLine("invalid_request", "Streaming is not supported in a batch.", "body.stream")
    for reserved in ("kv_transfer_params", "priority"):
        if reserved in body:
            raise BadLine("invalid_request", f"'{reserved}' is not yours to set.", f"body.{reserved}")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(f"body.{name}", "an integer", value)
        if value < 1:
            raise BadLine("integer_below_min_value", f"'{name}' must be at least 1.", f"body.{name}")
    count = body.get("n")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise BadLine("invalid_value", "'n' must be an integer of at least 1.", "body.n")


def _check_chat(body: dict[str, Any]) -> None:
    if "messages" not in body:
        raise missing("body.messages")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise wrong_type("body.messages", "an array", messages)
    if not messages:
        raise BadLine("empty_array", "'messages' must hold at least one message.", "body.messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise wrong_type(f"body.messages[{index}]", "an object", message)
        if not isinstance(message.get("role"), str):
            raise missing(f"body.messages[{index}].role")
        content = message.get("content")
        if content is not None and not isinstance(content, _TEXT_OR_PARTS):
            raise wrong_type(f"body.messages[{index}].content", "a string or an array", content)


def _needs(name: str) -> Callable[[dict[str, Any]], None]:
    def check(body: dict[str, Any]) -> None:
        if name not in body:
            raise missing(f"body.{name}")
        if not isinstance(body[name], _TEXT_OR_PARTS):
            raise wrong_type(f"body.{name}", "a string or an array", body[name])
        if not body[name]:
            raise BadLine("invalid_value", f"'{name}' must not be empty.", f"body.{name}")

    return check


_CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "/v1/chat/completions": _check_chat,
    "/v1/completions": _needs("prompt"),
    "/v1/responses": _needs("input"),
    "/v1/embeddings": _needs("input"),
}


def estimated_tokens(size: int, body: Mapping[str, Any]) -> int:
    return size // BYTES_PER_TOKEN + _output_tokens(body)


def _output_tokens(body: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        if isinstance(body.get(name), int):
            return int(body[name]) * int(body.get("n") or 1)
    return DEFAULT_OUTPUT_TOKENS
