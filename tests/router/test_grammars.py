"""The gateway recognises grammars, limits new ones per key, and may refuse them per key or fleet."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from router.auth.keys import DefaultLimits, StructuredOutputs
from router.gateway.config import BatchAddress
from router.requests.grammars import grammar_of
from tests.router.test_rates import BOB, alice, limited
from tests.support.fake_fleet import ask, fleet, user

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}

GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"response_format": SCHEMA}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"text": {"format": SCHEMA}}, "text"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [STRICT]}, "tool_choice"),
    ({"tools": [{"type": "function", "name": "f", "strict": True}], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": False}, "tool_choice"),
]
ADDED = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "f"}}}
STRICT_ADDED = {
    "type": "tool_addition",
    "tool": {"type": "tool_definition", "definition": {"name": "f", "strict": True}},
}


def added(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x"}, {"role": "system", "content": [*blocks]}]


ONE_CALL = {"type": "auto", "disable_parallel_tool_use": True}  # Anthropic's
GRAMMARS += [
    ({"tools": [TOOL], "tool_choice": ONE_CALL}, "tool_choice"),
    ({"messages": added(ADDED), "tool_choice": ONE_CALL}, "tool_choice"),
    ({"messages": added(STRICT_ADDED)}, "tool_choice"),
    ({"messages": added(ADDED), "tool_choice": {"type": "any"}}, "tool_choice"),
    # vLLM reads these as booleans
    ({"tools": [TOOL], "parallel_tool_calls": 0}, "tool_choice"),
    ({"tools": [TOOL], "parallel_tool_calls": "false"}, "tool_choice"),
    ({"tools": [{"type": "function", "name": "f", "strict": "true"}]}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice"),
]
FREE: list[dict[str, Any]] = [
    {},
    {"structured_outputs": None, "response_format": None, "text": None},
    {"response_format": {"type": "text"}},
    {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    {"output_config": {"effort": "low"}},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [STRICT], "tool_choice": "none"},
    {"tool_choice": "required"},
    {"tools": [TOOL], "parallel_tool_calls": True},
    {"tools": [{**TOOL, "strict": False}], "tool_choice": ONE_CALL | {"disable_parallel_tool_use": False}},
    {"messages": added(ADDED, {"type": "text", "text": "x"}, "x"), "tool_choice": {"type": "auto"}},
    {"messages": [{"role": "user", "content": [STRICT_ADDED]}, "x", {"role": "system", "content": "x"}]},
]


@pytest.mark.parametrize(("body", "field"), GRAMMARS)
def test_a_grammar_is_recognised_in_requests_of_every_api(body: dict[str, Any], field: str) -> None:
    found = grammar_of(body)
    assert found is not None and found.field == field


@pytest.mark.parametrize("body", FREE)
def test_a_request_for_plain_text_has_no_grammar(body: dict[str, Any]) -> None:
    assert grammar_of(body) is None


def test_grammars_are_equal_exactly_if_their_content_is() -> None:
    one = grammar_of({"messages": ["a"], "structured_outputs": {"regex": "a", "x": 1}})
    same = grammar_of({"messages": ["b"], "structured_outputs": {"x": 1, "regex": "a"}})
    other = grammar_of({"messages": ["a"], "structured_outputs": {"regex": "b", "x": 1}})
    assert one == same and one != other
    assert grammar_of({"messages": added(STRICT_ADDED)}) != grammar_of(
        {"messages": added(STRICT_ADDED, ADDED)}
    )


@pytest.mark.slow
async def test_a_key_gets_a_429_beyond_its_limit_of_new_grammars_per_minute(tmp_path: Path) -> None:
    async with limited(tmp_path, {"grammars_per_minute": 2}) as made:
        url = made.urls[0]
        asked = [*("a", "b", "a", "b", "c", "a")]
        got = [await alice(url, "hi", structured_outputs={"regex": regex}) for regex in asked]
        assert [one.status for one in got] == [200, 200, 200, 200, 429, 200]
        assert "2 new grammars a minute" in got[4].error["message"]
        assert (await alice(url, "no grammar")).status == 200
        others = await ask(url, [user("hi")], headers=BOB, structured_outputs={"regex": "c"})
        assert others.status == 200


@pytest.mark.slow
async def test_a_key_that_may_not_use_structured_outputs_is_refused_them(tmp_path: Path) -> None:
    async with limited(tmp_path, {"structured_outputs": "refuse"}) as made:
        url = made.urls[0]
        refused = await alice(url, "hi", response_format=SCHEMA)
        assert refused.status == 403 and refused.error["code"] == "structured_outputs_refused"
        assert (
            refused.error["param"] == "response_format"
            and "leave response_format out" in refused.error["message"]
        )
        assert (await alice(url, "hi", tools=[TOOL])).status == 200
        assert (await ask(url, [user("hi")], headers=BOB, response_format=SCHEMA)).status == 200


@pytest.mark.slow
async def test_a_key_without_structured_outputs_creates_no_batches(tmp_path: Path) -> None:
    nowhere = BatchAddress("127.0.0.1:9")
    async with (
        limited(tmp_path, {"structured_outputs": "refuse"}, batch=nowhere) as made,
        httpx.AsyncClient() as http,
    ):
        for secret, status in (("alice", 403), ("bob", 503)):
            headers = {"authorization": f"Bearer {secret}"}
            answer = await http.post(f"{made.urls[0]}/v1/batches", json={}, headers=headers)
            assert answer.status_code == status, answer.text


@pytest.mark.slow
async def test_a_fleet_can_refuse_structured_outputs_for_all_keys(tmp_path: Path) -> None:
    async with fleet(tmp_path, key_limits=DefaultLimits(structured_outputs=StructuredOutputs.REFUSE)) as made:
        refused = await ask(made.urls[0], [user("hi")], structured_outputs={"choice": ["a"]})
        assert refused.status == 403 and refused.error["code"] == "structured_outputs_refused"
        assert (await ask(made.urls[0], [user("hi")])).status == 200
