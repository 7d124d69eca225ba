"""One spelling for messages that mean the same, so that a prefix is recognised however a client writes it.

Equal on purpose: `"content": "x"` and one text part; null, empty list and a missing field; the spacing of a
tool call's argument JSON; cache markers that move from turn to turn; ids and states of response items.
"""

from collections.abc import Mapping
from typing import Any

import orjson

# Fields that clients add, move or drop between turns without changing the prompt.
_UNSTABLE = frozenset({"cache_control", "annotations", "status", "index"})
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_ITEM_UNSTABLE = frozenset({"id", "status"})


class TooDeep(ValueError):
    """A message nested more deeply than a canonical form can be written."""


def canonical(message: object) -> bytes:
    if type(message) is dict and len(message) == 2:  # by far the most common shape needs no rewriting
        role, content = message.get("role"), message.get("content")
        if type(role) is str and type(content) is str:
            return _plain(role, content)
    if isinstance(message, Mapping):
        message = _message(message)
        role, content = message.get("role"), message.get("content", "")
        if isinstance(role, str) and isinstance(content, str) and message.keys() <= {"role", "content"}:
            return _plain(role, content)
    try:
        return orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError) as wrong:
        raise TooDeep("a message is nested too deeply") from wrong


def _plain(role: str, content: str) -> bytes:
    return f"{role}\0{content}".encode("utf-8", "surrogatepass")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    drop = _UNSTABLE
    if "type" in message:  # an item of the responses API: its id is the server's, not part of the prompt
        drop = _UNSTABLE | _ITEM_UNSTABLE
    kept = {name: value for name, value in message.items() if name not in drop and _present(value)}
    if kept.get("type") == "message":
        del kept["type"]
    if "content" in kept:
        kept["content"] = _content(kept["content"])
    if "tool_calls" in kept and isinstance(kept["tool_calls"], list):
        kept["tool_calls"] = [_tool_call(call) for call in kept["tool_calls"]]
    if isinstance(kept.get("arguments"), str):
        kept["arguments"] = _arguments(kept["arguments"])
    return kept


def _present(value: object) -> bool:
    return value is not None and value != [] and value != ""


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = [_part(part) for part in content]
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return parts


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    kept = {name: value for name, value in part.items() if name not in _UNSTABLE and _present(value)}
    if kept.get("type") in _TEXT_TYPES and kept.keys() <= {"type", "text"}:
        return kept.get("text", "")
    return kept


def _tool_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    kept = {name: value for name, value in call.items() if name not in _UNSTABLE and _present(value)}
    function = kept.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        kept["function"] = {**function, "arguments": _arguments(function["arguments"])}
    return kept


def _arguments(text: str) -> Any:
    """Arguments are JSON inside a string, and frameworks write it back with other spacing."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
