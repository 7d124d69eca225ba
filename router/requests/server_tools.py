"""Tools in requests that no engine offers, such as a provider's own web search.

Coding agents list such tools for any model, and engines refuse the whole request because of them. They are
dropped and reported like unknown fields. To the agent it seems that the model never calls them.
"""

from collections.abc import Mapping
from typing import Any

# vLLM renders the first three into the prompt, and runs the others if it is configured with a tool server.
_OF_RESPONSES = frozenset(
    {"function", "custom", "namespace", "web_search_preview", "code_interpreter", "container", "mcp"}
)


def supported_tools(path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields that replace `tools` and `tool_choice` of a body, and the names of dropped tools.

    A field with the value None is to be removed from the body.
    """
    tools = body.get("tools")
    if path not in ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens") or type(tools) is not list:
        return {}, ()
    supported = _of_responses if path == "/v1/responses" else _of_messages
    kept, left_out = [], []
    names: dict[str, None] = {}  # in the order of the tools, each once
    for tool in tools:
        replaced, name = supported(tool) if isinstance(tool, dict) else (tool, "")
        if name:
            names[f"tools.{name}"] = None
        if replaced is None:
            left_out.append(tool)
        else:
            kept.append(replaced)
    if not names:
        return {}, ()
    fields: dict[str, Any] = {"tools": kept or None}
    if body.get("tool_choice") is not None and (not kept or _names_one(body["tool_choice"], left_out)):
        fields["tool_choice"] = None
        names["tool_choice"] = None
    return fields, tuple(names)


def _of_responses(tool: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return the part of a Responses tool that engines support, and a name for the part that is left out."""
    kind = tool.get("type")
    if type(kind) is str and kind not in _OF_RESPONSES:
        return None, kind
    form = tool.get("format")
    if kind == "custom" and isinstance(form, dict) and form.get("type") == "grammar":
        return {name: value for name, value in tool.items() if name != "format"}, f"{tool.get('name')}.format"
    return tool, ""


def _of_messages(tool: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return a Messages tool and an empty name; for a tool that engines do not support, None and its type."""
    kind = tool.get("type")
    if type(kind) is str and kind != "custom" and "input_schema" not in tool:
        return None, kind
    return tool, ""


def _names_one(choice: object, tools: list[dict[str, Any]]) -> bool:
    """Return whether a `tool_choice` selects one of these tools."""
    if not isinstance(choice, dict):
        return False
    kind, name = choice.get("type"), choice.get("name")
    return any(kind == tool["type"] or (name and name == tool.get("name")) for tool in tools)
