"""Tools that only a provider's servers can run are dropped, and the answer names them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from router.requests.body_parser import CHEAP_BYTES
from router.requests.fields import UnknownFields, check_fields, known_part
from tests.support.fake_fleet import FakeFleet, ask, fleet, user

IGNORED = "x-conserve-ignored-fields"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FUNCTION = {"type": "function", "name": "read", "parameters": {"type": "object"}}
GROUP = {"type": "namespace", "name": "agents", "description": "d", "tools": [FUNCTION]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "d"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
READ = {"name": "Read", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    context = {"max_context": 1_000_000, "kv_tokens": 2_000_000}
    async with fleet(tmp_path, decoders=1, engine=context) as running:
        yield running


def sent(path: str, tools: list[Any], choice: Any = None) -> tuple[dict[str, Any], str]:
    """Return the fields `tools` and `tool_choice` that an engine gets, and the names of dropped tools."""
    body = {"model": "m", "tools": tools} | ({"tool_choice": choice} if choice is not None else {})
    ignored = ", ".join(check_fields(path, body))
    return {name: value for name, value in known_part(path, body).items() if name != "model"}, ignored


def test_only_provider_tools_are_dropped_from_a_request_of_codex() -> None:
    tools = [FUNCTION, GROUP, {"type": "web_search", "external_web_access": True}, {"type": "local_shell"}]
    assert sent(RESPONSES, tools) == ({"tools": [FUNCTION, GROUP]}, "tools.web_search, tools.local_shell")


def test_a_custom_tool_is_kept_without_the_grammar_that_engines_refuse() -> None:
    got = sent(RESPONSES, [{**PATCH, "format": GRAMMAR}, {**PATCH, "format": {"type": "text"}}])
    assert got == ({"tools": [PATCH, {**PATCH, "format": {"type": "text"}}]}, "tools.apply_patch.format")


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_claude_codes_web_search_is_dropped_together_with_a_tool_choice_that_names_it(path: str) -> None:
    assert sent(path, [READ, SEARCH]) == ({"tools": [READ]}, "tools.web_search_20250305")
    forced = {"type": "tool", "name": "web_search"}
    assert sent(path, [READ, SEARCH], forced) == (
        {"tools": [READ]},
        "tools.web_search_20250305, tool_choice",
    )
    assert sent(path, [SEARCH], {"type": "any"}) == ({}, "tools.web_search_20250305, tool_choice")
    kept = {"type": "tool", "name": "Read"}
    assert sent(path, [READ, SEARCH], kept)[0] == {"tools": [READ], "tool_choice": kept}


def test_tools_that_engines_support_or_check_themselves_stay_in_the_request() -> None:
    for path, tools in (
        (RESPONSES, [FUNCTION, PATCH, {"type": "mcp", "server_label": "s"}, {"type": 3}, "x"]),
        (MESSAGES, [READ, {**READ, "type": "custom"}, {"name": "no schema"}, None]),
        ("/v1/chat/completions", [{"type": "web_search"}]),
    ):
        assert sent(path, tools) == ({"tools": tools}, "")
    assert sent(RESPONSES, [{"type": "web_search", "name": ["x"]}], {"name": ["x"]})[0] == {}


@pytest.mark.parametrize("extra", [0, CHEAP_BYTES])
async def test_engines_get_small_and_large_bodies_without_dropped_tools(made: FakeFleet, extra: int) -> None:
    content = "é" + "x" * extra
    tools = [{"type": "web_search"}, FUNCTION]
    choice = {"type": "web_search"}
    answer = await ask(made.urls[0], [user(content)], path=RESPONSES, tools=tools, tool_choice=choice)
    assert (answer.status, answer.headers[IGNORED]) == (200, "tools.web_search, tool_choice")
    for request in (*made.decoder_requests(), *made.prefills()):
        assert request.body["tools"] == [FUNCTION] and "tool_choice" not in request.body
        assert request.raw.count(b'"tools"') == 1
        assert request.body["input"] == [user(content)]


async def test_a_fleet_that_refuses_unknown_fields_refuses_provider_tools_too(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1, unknown_fields=UnknownFields.REFUSE) as made:
        answer = await ask(made.urls[0], [user("x")], path=MESSAGES, max_tokens=3, tools=[SEARCH])
        assert (answer.status, b"tools.web_search_20250305" in answer.body) == (400, True)
        assert orjson.loads(answer.body)["type"] == "error"
