"""Grammar that a request makes an engine compile: which field contains it, and a digest of its content."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from xxhash import xxh3_128_digest

_FREE = (None, "text")
_PARALLEL = (None, True)  # engines take 0 or "false" for False


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on an answer that an engine compiles."""

    field: str  # field of the body that asks for the grammar
    digest: bytes


def grammar_of(body: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar that an engine has to compile for this body, or None if the answer is unconstrained.

    Tools that the model need not call count only if one of them is strict or parallel calls are off, because
    an engine then constrains calls by a grammar.
    """
    asked = dict(_constraints(body))
    if not asked:
        return None
    written = orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)
    return Grammar(next(iter(asked)), xxh3_128_digest(written))


def _constraints(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if body.get("structured_outputs"):
        yield "structured_outputs", body["structured_outputs"]
    if _type(body.get("response_format")) not in _FREE:
        yield "response_format", body["response_format"]
    for block in ("text", "output_config"):  # of the Responses API, of Anthropic's
        value = body.get(block)
        chosen = value.get("format") if isinstance(value, dict) else None
        if _type(chosen) not in _FREE:
            yield block, chosen
    tools = list(_tools(body))
    if _constrains_calls(body, tools):
        yield "tool_choice", [body.get("tool_choice"), tools]


def _type(value: Any) -> Any:
    """Return the type of a format or tool choice: a text itself, an object's `type`, otherwise `other`."""
    kind = value.get("type") if isinstance(value, dict) else value
    return kind if kind is None or isinstance(kind, str) else "other"


def _tools(body: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tools of a body, and the tools that system messages of Anthropic's API add."""
    tools, messages = body.get("tools"), body.get("messages")
    yield from tools if isinstance(tools, list) else ()
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "system":
            yield from _added_tools(message.get("content"))


def _added_tools(content: Any) -> Iterator[Any]:
    for block in content if isinstance(content, list) else ():
        change = block.get("tool") if isinstance(block, dict) else None
        if isinstance(change, dict) and change.get("definition"):
            yield change["definition"]


def _constrains_calls(body: Mapping[str, Any], tools: list[Any]) -> bool:
    choice = body.get("tool_choice")
    if not tools or _type(choice) == "none":
        return False
    if _type(choice) not in (None, "auto"):
        return True
    single = isinstance(choice, dict) and choice.get("disable_parallel_tool_use")  # Anthropic's
    return bool(single) or body.get("parallel_tool_calls") not in _PARALLEL or any(map(_is_strict, tools))


def _is_strict(tool: Any) -> bool:
    """Return whether calls of a tool must follow its schema. Engines take 1 or "true" for True."""
    if not isinstance(tool, dict):
        return False
    function = tool.get("function")
    return bool(tool.get("strict") or (isinstance(function, dict) and function.get("strict")))
